"""Holds the parts with which `supervisor.py` runs each role as an operating-system process:
`ProcessSpec` describes a role's process, `ChildProcess` is one that was started (it stops the
process and keeps its log), and `RestartPolicy` decides when the role starts again after a death.

A role calls `end_with_parent` first, so it never outlives its supervisor, even if the supervisor is
killed with `kill -9`.
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
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.5


def end_with_parent(environment: Mapping[str, str] = os.environ) -> None:
    """Make this process die as soon as its parent ends, even by `kill -9`. The parent's process id
    is in the variable `ROLLSTREAM_PARENT`, which `ChildProcess` sets; without the variable (a role
    started by hand) nothing happens. Every role calls this before it opens its configuration.

    On Linux the kernel sends this process SIGKILL (`prctl(PR_SET_PDEATHSIG, SIGKILL)`). On other
    systems a thread polls the parent's process id twice a second and sends SIGKILL itself.
    """
    parent = environment.get(PARENT_VARIABLE)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_poll_parent, args=(int(parent),), daemon=True).start()
    if os.getppid() != int(parent):  # the parent died before the call
        _kill_self()


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    _kill_self()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ERROR_PREFIX = "rollstream: "  # begins the error message that a failing command prints last
LINE_BYTES_MAX = 400  # a log line quoted in a message is cut here
MESSAGE_BYTES_MAX = 4000  # a role's own error message is cut here
_TAIL_BYTES = 1 << 14  # no more of the end of a log is read
LOG_BYTES_MAX = 16 << 20
"""Size above which a role's log is copied to `<name>.log.1`, replacing an earlier copy, and
emptied.
"""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Describes a process that the run needs.

    `ends` states what an exit with code 0 means: the whole run is complete ("run"), only this
    role's work is complete ("itself"), or nothing is, so the exit counts as a death ("never").

    `single_holder` marks a role that needs a lease. When it is restarted, it receives the nonce
    (random text) that identified the dead process as the lease's holder, and so takes the lease
    over without waiting for it to expire. A role that `stops_last` is stopped after all others,
    because it reads their records.
    """

    name: str
    command: Sequence[str]
    ends: Literal["run", "itself", "never"] = "never"
    single_holder: bool = False
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    stops_last: bool = False


class ChildProcess:
    """Starts the process that `seat` describes, and controls it until `reap` returns its exit code.
    The output of the process is appended to `log`. The process inherits the file descriptor `lock`
    of the run's lock (`RunLock`), so the run stays locked as long as one of its processes lives.

    The process leads its own process group. So Ctrl-C in a terminal reaches only the supervisor,
    which then stops the roles in order.
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
                process_group=0,
                pass_fds=() if lock is None else (lock,),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def reap(self) -> int | None:
        """Returns the exit code once the process has ended (−9 if signal 9 ended it), None while
        the process runs. Does not wait.
        """
        return self._process.poll()

    def error_message(self) -> str:
        """Returns the first error message (`ERROR_PREFIX`) that this process logged, with the lines
        after it; "" if the end of the log has none.
        """
        lines = _log_tail(self.log, self._began).splitlines()
        first = next(
            (n for n, line in enumerate(lines) if line.startswith(ERROR_PREFIX)), len(lines)
        )
        return "\n".join(lines[first:]).removeprefix(ERROR_PREFIX)[:MESSAGE_BYTES_MAX]

    def rotate_log(self, bytes_max: int = LOG_BYTES_MAX) -> None:
        """If the log is larger than `bytes_max`, copy it to `<name>.log.1` and empty it. The log
        cannot be renamed, because the role keeps the file open and appends to it. A line that the
        role writes after the copy and before the log is emptied is lost.
        """
        try:
            if self.log.stat().st_size > bytes_max:
                shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
                os.truncate(self.log, 0)
                self._began = 0
        except FileNotFoundError:
            return  # a deleted log needs no room; `RunLock` notices a folder that is gone
        except OSError as error:  # the disk is full: no reason to stop
            print(f"{self.log} is not rotated: {explain_os_error(error)}", file=sys.stderr)

    def terminate(self) -> None:
        """Send SIGTERM, on which the role finishes its current work and exits. Does not wait."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def _opened_log(log: Path) -> BinaryIO:
    """Open the log for appending. If it cannot be made (a full disk), the process runs without one,
    with a warning.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        warn_unwritten(log, error, "the process runs without a log")
        return Path(os.devnull).open("ab")


def warn_unwritten(path: Path, error: OSError, effect: str) -> None:
    """Log that a file of the run's folder could not be written, the effect, and what to do."""
    _logger.warning("%s is not written: %s; %s", path, explain_os_error(error), effect)


def last_lines(log: Path, count: int = 12) -> list[str]:
    """Returns the last `count` lines of a log, also those that were copied to `<name>.log.1`; an
    empty list if the log does not exist.
    """
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
    """Returns an exit code as text: `exit code 1`, or the signal's name for a negative code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def is_final_exit(code: int, before: int | None) -> bool:
    """Returns whether a role that died with exit code `code` must not be started again. `before` is
    the exit code of its previous death, None at the first.

    A new start cannot help if the role refused to start (`EXIT_REFUSED`, for instance because of a
    wrong setting), or if it could not open its engine twice in a row (`EXIT_UNSERVED`).
    """
    return code == EXIT_REFUSED or code == before == EXIT_UNSERVED


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Decides when a dead role starts again: `first_s` seconds after its first death, twice as long
    after each further death within `within_s` seconds, at most `longest_s`. After more than
    `deaths_max` deaths within `within_s` the role is given up, which ends the run.
    """

    deaths_max: int = 5
    within_s: float = 60.0
    first_s: float = 0.25
    longest_s: float = 8.0

    def recent(self, deaths_s: Sequence[float], now_s: float) -> int:
        """Returns how many of these deaths (monotonic times) are at most `within_s` seconds old."""
        return sum(1 for death in deaths_s if now_s - death < self.within_s)

    def delay_s(self, deaths_s: Sequence[float], now_s: float) -> float | None:
        """Returns the seconds to wait before the next start; None if the role died too often. The
        last of `deaths_s` is the death that just happened.
        """
        recent = self.recent(deaths_s, now_s)
        if recent > self.deaths_max:
            return None
        return min(self.longest_s, self.first_s * 2 ** max(0, recent - 1))
