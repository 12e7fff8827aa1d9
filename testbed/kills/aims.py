"""Aims: a signal that a process sends to itself exactly before or after its n-th write of a kind,
and the list of writes that a run makes. They are files that a test puts into a folder for real
processes.

The folder has `aims.json` (the planned signals), `writes/<process>-<pid>` (a line per write) and
`fired-<n>` (an aim that was fired: once per run, whatever restarts).
"""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from testbed.repository import ROOT
from testbed.stepped.crashes import Side

Result = TypeVar("Result")
FOLDER = "AIMED_WRITES"
Deed = Literal["KILL", "STOP"]


@dataclass(frozen=True)
class Aim:
    """`process` sends itself SIGKILL or SIGSTOP at one side of its `nth` write of `kind`, counted
    from 1 in the life of a process; 0 is the next one after the aim was set. With `everybody` its
    supervisor and all roles are killed too.
    """

    process: str
    kind: str
    side: Side = "before"
    nth: int = 1
    deed: Deed = "KILL"
    everybody: bool = False

    def __str__(self) -> str:
        return f"{self.process} {self.side} its {self.kind} no. {self.nth}"


class AimFolder:
    """The test's side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "writes").mkdir(parents=True, exist_ok=True)
        self.aims: list[Aim] = []
        self.aim()

    def aim(self, *aims: Aim) -> None:
        """Adds an aim."""
        self.aims += aims
        partial = self.path / "aims.partial"
        partial.write_text(json.dumps([asdict(one) for one in self.aims]))
        partial.replace(self.path / "aims.json")

    def environment(self) -> dict[str, str]:
        """The variables of a process that uses the folder, and this repository wherever it
        starts.
        """
        return {FOLDER: str(self.path), "PYTHONPATH": str(ROOT)}

    def fired(self) -> list[bool]:
        """The aims that were fired, in their order."""
        return [(self.path / f"fired-{n}").exists() for n in range(len(self.aims))]

    def writes(self, process: str, pid: int | None = None) -> Counter[str]:
        """The kinds of a process' writes by count, over all its lives or in one."""
        files = self.path.glob(f"writes/{process}@{'*' if pid is None else pid}")
        return Counter(line for file in files for line in file.read_text().splitlines())

    def processes(self) -> list[str]:
        return sorted({file.name.partition("@")[0] for file in self.path.glob("writes/*@*")})


class AimedGate:
    """The process' side, with the two methods of `Gate` that a store calls."""

    def __init__(self, folder: Path, process: str) -> None:
        self._folder, self._process = folder, process
        self._aims: list[tuple[int, Aim]] = []
        self._read = (0, 0, 0)
        self._turn = threading.Condition()
        self._making = 0
        self._counts: Counter[str] = Counter()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._writes = os.open(folder / "writes" / f"{process}@{os.getpid()}", flags, 0o666)

    def look(self) -> None:
        """Reads pass at once."""

    def write(self, kind: str, make: Callable[[], Result]) -> Result:
        """Makes the write, unless the process is killed before it."""
        with self._turn:
            self._counts[kind] += 1
            nth = self._counts[kind]
            known = self._known()
        due = [(n, aim) for n, aim in known if aim.kind == kind and aim.nth in (0, nth)]
        self._strike(due, "before")
        with self._turn:
            self._making += 1
        try:
            made = make()
        finally:
            with self._turn:
                self._making -= 1
                self._turn.notify_all()
        os.write(self._writes, f"{kind}\n".encode())
        self._strike(due, "after")
        return made

    def _known(self) -> list[tuple[int, Aim]]:
        """The aims at this process; the file is read again when it changed."""
        file = self._folder / "aims.json"
        now = file.stat()
        # Each writing is a new file, which may get the number of the last but one.
        changed = now.st_ino, now.st_mtime_ns, now.st_size
        if changed != self._read:
            known = [Aim(**one) for one in json.loads(file.read_text())]
            self._aims = [(n, aim) for n, aim in enumerate(known) if aim.process == self._process]
            self._read = changed
        return self._aims

    def _strike(self, due: Sequence[tuple[int, Aim]], side: Side) -> None:
        for number, aim in due:
            if aim.side != side or not self._is_first(number):
                continue
            if aim.deed == "STOP":
                self._stop()
            elif aim.everybody:
                os.kill(os.getppid(), signal.SIGKILL)
            if aim.deed == "KILL":
                os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        """Stops the process between the writes of all threads: a thread stopped within a write
        holds a lock of SQLite or of the file store, and other processes could only wait until it
        continues or ends.
        """
        with self._turn:
            self._turn.wait_for(lambda: not self._making)
            # To this thread: after a signal to the process it may run on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def _is_first(self, number: int) -> bool:
        try:
            (self._folder / f"fired-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
