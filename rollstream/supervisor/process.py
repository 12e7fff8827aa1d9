"""One role as an operating-system process: its command line, environment and log.

A child leads its own process group, so that Ctrl-C in a terminal reaches only the supervisor, which
then stops the roles in order. It inherits the run's lock and dies with its supervisor.
"""

import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollstream.supervisor.lifeline import PARENT_VARIABLE as PARENT

ERROR_PREFIX = "rollstream: "  # prefix of the error message with which `main` ends
LINE_BYTES_MAX = 400  # of a log line quoted in a message
MESSAGE_BYTES_MAX = 4000  # of a role's own error message
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process that the run needs.

    `ends` is the meaning of its exit with code 0: the whole run is complete, only this role's work
    is complete, or ("never") the process died. A `single_holder` receives the nonce of the lease
    that its predecessor held. A role that `stops_last` is stopped after all others have ended,
    because it reads their records.
    """

    name: str
    command: Sequence[str]
    ends: Literal["run", "itself", "never"] = "never"
    single_holder: bool = False
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    stops_last: bool = False


class ChildProcess:
    """A running role."""

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
                env={**os.environ, **seat.environment, **environment, PARENT: str(os.getpid())},
                process_group=0,
                pass_fds=() if lock is None else (lock,),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def reap(self) -> int | None:
        """Its exit code once it ended (−9 for signal 9), None while it runs."""
        return self._process.poll()

    def words(self) -> str:
        """Its own error message since its start and the lines after it; may be empty."""
        lines = _log_tail(self.log, self._began).splitlines()
        first = next((n for n, line in enumerate(lines) if line.startswith(ERROR_PREFIX)), len(lines))
        return "\n".join(lines[first:]).removeprefix(ERROR_PREFIX)[:MESSAGE_BYTES_MAX]

    def ask_to_stop(self) -> None:
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
    """The end of a log, as text; empty without a log."""
    lines = deque(_log_tail(log, 0).splitlines(), maxlen=count)
    return [line[:LINE_BYTES_MAX] for line in lines]


def _log_tail(log: Path, since: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def describe_exit(code: int) -> str:
    """An exit code as text."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
