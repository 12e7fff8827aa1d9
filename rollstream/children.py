"""One role as an operating-system process: its command line, environment and log.

A child leads its own process group, so that Ctrl-C in a terminal reaches the supervisor alone,
which then stops the roles in order. It inherits the run's lock (`lock.py`) and dies with its
supervisor (`lifeline.py`).
"""

import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollstream.lifeline import VARIABLE as PARENT

SAYS = "rollstream: "  # what `main` begins with when it says why it ends
LINE_BYTES_MAX = 400  # of a log line quoted in a message
WORDS_BYTES_MAX = 4000  # of what a role said itself
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Seat:
    """A process that the run needs.

    `ends`: what its exit with code 0 means: the whole run is complete, only this role's work is,
    or (never) that it died. A `single_holder` is given the nonce of the lease that its predecessor
    held. One that `stops_last` is asked to when all others have ended, because it reads what they
    write.
    """

    name: str
    command: Sequence[str]
    ends: Literal["run", "itself", "never"] = "never"
    single_holder: bool = False
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    stops_last: bool = False


class Child:
    """A running role."""

    def __init__(
        self, seat: Seat, log: Path, environment: Mapping[str, str], lock: int | None
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
        """Why it ended, as it said itself since its start, and what followed; perhaps nothing."""
        lines = _tail(self.log, self._began).splitlines()
        first = next((n for n, line in enumerate(lines) if line.startswith(SAYS)), len(lines))
        return "\n".join(lines[first:]).removeprefix(SAYS)[:WORDS_BYTES_MAX]

    def ask_to_stop(self) -> None:
        """SIGTERM: the role finishes what it must and exits."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def last_lines(log: Path, count: int = 12) -> list[str]:
    """The end of a log, as text; nothing if there is no log."""
    lines = deque(_tail(log, 0).splitlines(), maxlen=count)
    return [line[:LINE_BYTES_MAX] for line in lines]


def _tail(log: Path, since: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
