"""The roles of a run as separate processes that a test starts in any order, without a supervisor
that passes leases on or restarts them; a signal may be aimed at each of their writes.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rollstream.run.config.config import load
from rollstream.run.config.run_folder import folder_of_run, write_configuration
from testbed.kills.aims import AimFolder
from testbed.run_process import SETTINGS
from testbed.waiting import WAIT_S, wait_for

COMMANDS = {
    "trainer": "train", "dispatch": "dispatch", "prompts": "prompts", "archive": "archive",
    "rollout-0": "rollout", "rollout-1": "rollout", "relay": "relay", "scorer-0": "score",
}  # fmt: skip
"""Every process of a run by the command that starts it."""


@dataclass
class Hand:
    """One process of a role; `log` is its own."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def is_stopped(self) -> bool:
        """Returns whether it was stopped by SIGSTOP; a role that ended instead is a failure."""
        assert self.process.poll() is None, self.describe()
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def describe(self) -> str:
        return f"{self.name} ended with {self.process.poll()}:\n{self.log.read_text()[-3000:]}"


@dataclass
class RunByHand:
    """`aims` holds for processes that start from then on."""

    folder: Path
    aims: AimFolder
    hands: list[Hand] = field(default_factory=list[Hand])

    def start(self, name: str, node: Path | None = None) -> Hand:
        """Starts another process of this name, a successor too; `node` is the run's folder on
        another machine.
        """
        command = [sys.executable, "-m", "testbed.kills.aimed_role", COMMANDS[name]]
        command += [str((node or self.folder) / "config.json"), "--name", name]
        log = self.folder.parent / f"{name}-{len(self.hands)}.log"
        environment = {**self.aims.environment(), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        hand = Hand(name, process, log)
        self.hands.append(hand)
        return hand

    def wait_for(self, condition: Callable[[], object]) -> None:
        wait_for(condition, describe=lambda: self._describe(""))

    def wait_complete(self, *others: Callable[[], object]) -> None:
        """Waits until a trainer ends with the run complete, then stops every other role, the
        archive last. Each of `others` is called again and again meanwhile.
        """

        def is_complete() -> bool:
            for other in others:
                other()
            return any(h.name == "trainer" and h.process.poll() == 0 for h in self.hands)

        self.wait_for(is_complete)
        for last in (False, True):
            stopping = [h for h in self.hands if (h.name == "archive") == last]
            for hand in stopping:
                if hand.process.poll() is None:
                    hand.signal(signal.SIGTERM)
            for hand in stopping:
                self.wait_for(lambda hand=hand: hand.process.poll() is not None)

    def end(self) -> None:
        """Kills every process that is left."""
        for hand in self.hands:
            if hand.process.poll() is None:
                hand.signal(signal.SIGCONT)
                hand.kill()

    def _describe(self, why: str) -> str:
        return "\n".join([why, *(hand.describe() for hand in self.hands)])


@contextmanager
def by_hand(folder: Path, model: Path, more: Sequence[str] = ()) -> Generator[RunByHand]:
    """A new run without processes."""
    configuration = folder.parent / "tiny.toml"
    configuration.write_text('run = "tiny"\n')
    settings = [*SETTINGS, f"model.path={model}", f"folder={folder}", *more]
    loaded = load(configuration, settings, {})
    write_configuration(folder_of_run(loaded), loaded)
    run = RunByHand(folder, AimFolder(folder.parent / "aims"))
    try:
        yield run
    finally:
        run.end()
