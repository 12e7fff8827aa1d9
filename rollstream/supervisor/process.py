"""Runs one role as an operating-system process: `ProcessSpec` describes it, `ChildProcess` starts,
stops and logs it, and `RestartPolicy` decides when it starts again after a death.

No role outlives its supervisor, even if the supervisor is killed with `kill -9`
(`end_with_parent`).
"""

import ctypes
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
from typing import Literal

from rollstream.errors import EXIT_REFUSED, EXIT_UNSERVED

PARENT_VARIABLE = "ROLLSTREAM_PARENT"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.5


def end_with_parent(environment: Mapping[str, str] = os.environ) -> None:
    """Make this process end with its parent, whose process id is in `ROLLSTREAM_PARENT`, also after
    `kill -9` of the parent. Every role calls this function before it opens its configuration.

    On Linux the kernel sends SIGKILL (`prctl(PR_SET_PDEATHSIG, SIGKILL)`); on other systems a
    thread polls the parent's process id twice a second. A role started by hand (no
    `ROLLSTREAM_PARENT`) is not affected.
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


ERROR_PREFIX = "rollstream: "  # prefix of the error message with which `main` ends
LINE_BYTES_MAX = 400  # a log line quoted in a message is cut here
MESSAGE_BYTES_MAX = 4000  # a role's own error message is cut here
_TAIL_BYTES = 1 << 14
LOG_BYTES_MAX = 16 << 20
"""Size at which a role's log is moved to `<name>.log.1`, in place of the one before."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Describes a process that the run needs.

    `ends` is the meaning of its exit with code 0: the whole run is complete ("run"), only this
    role's work is complete ("itself"), or the process died ("never"). A `single_holder` receives
    the nonce of the lease that its predecessor held. A role that `stops_last` is stopped after all
    others have ended, because it reads their records.
    """

    name: str
    command: Sequence[str]
    ends: Literal["run", "itself", "never"] = "never"
    single_holder: bool = False
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    stops_last: bool = False


class ChildProcess:
    """Runs a role's process from construction until `reap` returns its exit code. `lock` is the
    descriptor of the run's lock, which the process inherits; output is appended to `log`.

    The process leads its own process group, so that Ctrl-C in a terminal reaches only the
    supervisor, which then stops the roles in order.
    """

    def __init__(
        self, seat: ProcessSpec, log: Path, environment: Mapping[str, str], lock: int | None
    ) -> None:
        self.seat, self.log = seat, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
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
        """Returns the exit code once the process has ended (−9 for signal 9), None while
        it runs.
        """
        return self._process.poll()

    def error_message(self) -> str:
        """Returns the error message that the role logged since its start, with the lines after it;
        may be empty.
        """
        lines = _log_tail(self.log, self._began).splitlines()
        first = next(
            (n for n, line in enumerate(lines) if line.startswith(ERROR_PREFIX)), len(lines)
        )
        return "\n".join(lines[first:]).removeprefix(ERROR_PREFIX)[:MESSAGE_BYTES_MAX]

    def rotate_log(self, bytes_max: int = LOG_BYTES_MAX) -> None:
        """Keep the log below twice `bytes_max`, in two files. The role appends to the same open
        file, so the log is copied and emptied; a line that it writes between the two is lost.
        """
        try:
            if self.log.stat().st_size > bytes_max:
                shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
                os.truncate(self.log, 0)
                self._began = 0
        except OSError as error:  # the disk is full, or the folder is gone: no reason to stop
            print(f"{self.log} is not rotated: {error}", file=sys.stderr)

    def terminate(self) -> None:
        """Send SIGTERM: the role finishes its current work and exits."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def last_lines(log: Path, count: int = 12) -> list[str]:
    """Returns the last lines of a log, also across its rotation; empty without a log."""
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
    """Returns an exit code as text, by signal name for a negative one."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def is_final_exit(code: int, before: int | None) -> bool:
    """Returns whether a role that exits with `code`, after `before` at its previous death, is not
    started again: it refused to start for good, or could not open its engine twice in a row.
    """
    return code == EXIT_REFUSED or code == before == EXIT_UNSERVED


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Decides when a dead role starts again. The back-off doubles from `first_s` to `longest_s`;
    more than `deaths_max` deaths within `within_s` end the run.
    """

    deaths_max: int = 5
    within_s: float = 60.0
    first_s: float = 0.25
    longest_s: float = 8.0

    def recent(self, deaths_s: Sequence[float], now_s: float) -> int:
        """Returns the number of deaths within the last `within_s` seconds."""
        return sum(1 for death in deaths_s if now_s - death < self.within_s)

    def delay_s(self, deaths_s: Sequence[float], now_s: float) -> float | None:
        """Returns the seconds to wait before the next start, or None when the role died
        too often.
        """
        recent = self.recent(deaths_s, now_s)
        if recent > self.deaths_max:
            return None
        return min(self.longest_s, self.first_s * 2 ** max(0, recent - 1))
