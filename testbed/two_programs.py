"""An earlier program of this repository beside the present one: the roles of one run as processes
of either, replaced one at a time (invariant 14).

The earlier program is an archive in `testbed/recorded`, so a clone without history has it too. It
runs with this environment's packages: its folder comes first on the path of its processes.
"""

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_folder import open_run_log_for_writing
from rollstream.streams.bus import Bus
from rollstream.streams.topics import catalogue
from testbed.kills.roles_by_hand import COMMANDS, Hand
from testbed.recorded import PROGRAM_OF_2026_11_23, unpack
from testbed.repository import ROOT
from testbed.run_process import SETTINGS, steps_done
from testbed.waiting import WAIT_S, wait_for

REFUSED = 2
"""Exit code of a role that may not act on a run."""
NAMES = ("archive", "relay", "scorer-0", "rollout-0", "rollout-1", "prompts", "dispatch", "trainer")
"""The processes of a run in the order in which docs/how-to/upgrade.md replaces them."""


@dataclass(frozen=True)
class Program:
    """The program whose package `rollstream` is in `folder`."""

    name: str
    folder: Path

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "rollstream", *words]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Returns the ended command with what it printed."""
        return subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )


NEW = Program("new", ROOT)


def earlier_program(folder: Path) -> Program:
    """Unpacks the archived program into `folder`."""
    unpack(PROGRAM_OF_2026_11_23, folder)
    return Program("old", folder)


@dataclass
class MixedRun:
    """The processes of one run; `settings` are given to each that starts from then on."""

    folder: Path
    settings: list[str]
    hands: dict[str, Hand] = field(default_factory=dict[str, Hand])
    _started: int = 0

    def start(self, program: Program, name: str, *more: str) -> Hand:
        """Start this process, with `more` words on its command line."""
        self._started += 1
        log = self.folder.parent / f"{self._started:02}-{name}-{program.name}.log"
        words = [COMMANDS[name], str(self.folder.parent / "mixed.toml"), "--name", name, *more]
        words += [word for setting in self.settings for word in ("--set", setting)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                program.command(*words),
                cwd=program.folder,
                env=program.environment,
                stdout=output,
                stderr=output,
            )
        self.hands[name] = Hand(name, process, log)
        return self.hands[name]

    def start_all(self, program: Program) -> None:
        for name in NAMES:
            self.start(program, name)

    def stop(self, name: str) -> None:
        """Stop the process as an orchestrator does; it must not have ended before."""
        hand = self.hands.pop(name)
        assert hand.process.poll() is None, hand.describe()
        hand.process.terminate()
        hand.process.wait(WAIT_S)

    def replace(self, program: Program, name: str, *more: str) -> None:
        """Stop the process, start that of `program` in its place, and wait for two more steps."""
        self.stop(name)
        self.start(program, name, *more)
        self.wait_for_step(self.step() + 2)

    def step(self) -> int:
        return steps_done(self.folder)

    def wait_for_step(self, step: int) -> None:
        """Fails if a process has ended meanwhile."""

        def is_done() -> bool:
            ended = [hand for hand in self.hands.values() if hand.process.poll() is not None]
            assert not ended, "\n".join(hand.describe() for hand in ended)
            return self.step() >= step

        wait_for(is_done, describe=lambda: f"step {self.step()} of {step}")

    def wait_refused(self, name: str) -> str:
        """Waits until the process has refused the run; returns what it printed."""
        hand = self.hands.pop(name)
        wait_for(lambda: hand.process.poll() is not None, describe=hand.describe)
        assert hand.process.returncode == REFUSED, hand.describe()
        return hand.log.read_text()

    def wait_complete(self) -> None:
        """Waits until the trainer has ended with the run complete, then stops the others, the
        archive last.
        """
        trainer = self.hands.pop("trainer")
        wait_for(lambda: trainer.process.poll() is not None, describe=trainer.describe)
        assert trainer.process.returncode == 0, trainer.describe()
        for name in sorted(self.hands, key=lambda name: name == "archive"):
            self.stop(name)

    def end(self) -> None:
        """Kills every process that is left."""
        for hand in self.hands.values():
            if hand.process.poll() is None:
                hand.kill()


def state_of(folder: Path) -> dict[str, object]:
    """The ends of all topics, and the objects of the store with their contents' hashes."""
    with closing(_bus(folder)) as bus:
        ends: dict[str, object] = {
            topic: bus.end(topic) for topic in (one.name for one in catalogue())
        }
    store = folder / "store"
    files = sorted(path for path in store.rglob("*") if path.is_file())
    return ends | {str(path): sha256(path.read_bytes()).hexdigest() for path in files}


def _bus(folder: Path) -> Bus:
    return open_run_log_for_writing(load_for_viewing(folder / "config.json"), folder)


@contextmanager
def mixed_run(folder: Path, model: Path, more: Sequence[str]) -> Generator[MixedRun]:
    """A new run without processes; what its processes print is kept beside its folder."""
    (folder.parent / "mixed.toml").write_text('run = "mixed"\n')
    run = MixedRun(folder, [*SETTINGS, f"model.path={model}", f"folder={folder}", *more])
    try:
        yield run
    finally:
        run.end()
