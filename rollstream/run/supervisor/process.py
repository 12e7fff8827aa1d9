"""The parts with which `supervisor.py` runs a role. A role calls `end_with_parent` first, so it
never outlives its supervisor, even after `kill -9`.
"""

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from rollstream.errors import EXIT_REFUSED, EXIT_UNSERVED
from rollstream.os_failures import explain_os_error

_logger = logging.getLogger(__name__)

PARENT_VARIABLE = "ROLLSTREAM_PARENT"
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def end_with_parent(environment: Mapping[str, str] = os.environ) -> None:
    """This process dies as soon as its parent (`ROLLSTREAM_PARENT`, set by `ChildProcess`) ends,
    even by `kill -9`: by the kernel's signal on Linux, by a poll twice a second elsewhere. Every
    role calls this before it opens its configuration.
    """
    parent = environment.get(PARENT_VARIABLE)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_poll_parent, args=(int(parent),), daemon=True).start()
    # The parent died before the call.
    if os.getppid() != int(parent):
        _kill_self()


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    _kill_self()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Begins the error message that a failing command prints last.
ERROR_PREFIX = "rollstream: "
# A log line quoted in a message is cut here.
LINE_BYTES_MAX = 400
# A role's own error message is cut here.
MESSAGE_BYTES_MAX = 4000
# No more of the end of a log is read.
_TAIL_BYTES = 1 << 14
# A larger log of a role is copied to `<name>.log.1`, over an earlier copy, and emptied.
LOG_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """`ends` is the work that exit code 0 completes: the run, the role's own ("itself"), or none: a
    death ("never"). A restarted `single_holder` gets the nonce of the dead holder, and takes its
    lease over without waiting. A role that `stops_last` reads the records of the others.
    """

    name: str
    command: Sequence[str]
    ends: Literal["run", "itself", "never"] = "never"
    single_holder: bool = False
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    stops_last: bool = False


class ChildProcess:
    """Starts a process with output appended to `log`. It inherits the descriptor `lock` of the
    run's lock (`RunLock`), so the run stays locked as long as one of its processes lives.
    """

    def __init__(
        self, seat: ProcessSpec, log: Path, environment: Mapping[str, str], lock: int | None
    ) -> None:
        self.seat, self.log = seat, log
        with _opened_log(log) as output:
            self._began = output.tell()
            self._process = subprocess.Popen(
                list(seat.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **seat.environment,
                    **environment,
                    PARENT_VARIABLE: str(os.getpid()),
                },
                # Ctrl-C in a terminal reaches only the supervisor, which stops the roles in order.
                process_group=0,
                pass_fds=() if lock is None else (lock,),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def reap(self) -> int | None:
        """The exit code once the process has ended (−9 after signal 9), else None. Does
        not wait.
        """
        return self._process.poll()

    def error_message(self) -> str:
        """The first (`ERROR_PREFIX`) at the end of the log, with the lines after it; else ""."""
        lines = _log_tail(self.log, self._began).splitlines()
        first = next(
            (n for n, line in enumerate(lines) if line.startswith(ERROR_PREFIX)), len(lines)
        )
        return "\n".join(lines[first:]).removeprefix(ERROR_PREFIX)[:MESSAGE_BYTES_MAX]

    def rotate_log(self, bytes_max: int = LOG_BYTES_MAX) -> None:
        """A log larger than `bytes_max` is copied to `<name>.log.1` and emptied."""
        try:
            if self.log.stat().st_size > bytes_max:
                # Not renamed: the role keeps the file open and appends. A line that it writes
                # between these two calls is lost.
                shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
                os.truncate(self.log, 0)
                self._began = 0
        except FileNotFoundError:
            # A deleted log needs no room; `RunLock` notices a folder that is gone.
            return
        # The disk is full: no reason to stop.
        except OSError as error:
            print(f"{self.log} is not rotated: {explain_os_error(error)}", file=sys.stderr)

    def terminate(self) -> None:
        """Sends sIGTERM: the role finishes its current work and exits. Does not wait."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends sIGKILL; waits until the process has ended."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def _opened_log(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        # A full disk, for instance.
        warn_unwritten(log, error, "the process runs without a log")
        return Path(os.devnull).open("ab")


def warn_unwritten(path: Path, error: OSError, effect: str) -> None:
    """Logs a warning about a file of the run's folder."""
    _logger.warning("%s is not written: %s; %s", path, explain_os_error(error), effect)


def last_lines(log: Path, count: int = 12) -> list[str]:
    """Returns the last lines of a log and its copy; empty without a log."""
    both = _log_tail(log.with_suffix(".log.1"), 0) + _log_tail(log, 0)
    lines = deque(both.splitlines(), maxlen=count)
    return [line[:LINE_BYTES_MAX] for line in lines]


def _log_tail(log: Path, since: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def describe_exit(code: int) -> str:
    """`exit code 1`, or the signal's name for a negative code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def is_final_exit(code: int, before: int | None) -> bool:
    """A role that died with `code`, and `before` at its previous death, must not start again: it
    refused (`EXIT_REFUSED`), or could not open its engine twice in a row (`EXIT_UNSERVED`).
    """
    return code == EXIT_REFUSED or code == before == EXIT_UNSERVED


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A dead role starts again after `first_s` seconds, twice as long after each further death
    within `within_s` seconds, at most `longest_s`; more than `deaths_max` within `within_s` end the
    run.
    """

    deaths_max: int = 5
    within_s: float = 60.0
    first_s: float = 0.25
    longest_s: float = 8.0

    def recent(self, deaths_s: Sequence[float], now_s: float) -> int:
        """Returns how many of these deaths (monotonic times) are at most `within_s` seconds old."""
        return sum(1 for death in deaths_s if now_s - death < self.within_s)

    def delay_s(self, deaths_s: Sequence[float], now_s: float) -> float | None:
        """Returns the seconds to wait after the last of `deaths_s`; None if the role died too
        often.
        """
        recent = self.recent(deaths_s, now_s)
        if recent > self.deaths_max:
            return None
        return min(self.longest_s, self.first_s * 2 ** max(0, recent - 1))
