"""An earlier program of this repository beside the present one: the roles of one run as processes
of either, replaced one at a time (invariant 14).

The earlier program is an archive in `testbed/recorded`, so a clone without history has it too. It
runs with this environment's packages: its folder comes first on the path of its processes.
"""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_folder import open_run_log_for_writing
from rollstream.streams.bus import Bus
from rollstream.streams.topics import catalogue
from testbed.recorded import PROGRAM_OF_2026_11_23, unpack
from testbed.repository import ROOT
from testbed.run_driver import Machine, RunDriver
from testbed.run_process import SETTINGS

REFUSED = 2
"""Exit code of a role that may not act on a run."""
NAMES = ("archive", "relay", "scorer-0", "rollout-0", "rollout-1", "prompts", "dispatch", "trainer")
"""The processes of a run in the order in which docs/how-to/upgrade.md replaces them."""


def _program(folder: Path) -> Machine:
    """This machine with the program whose package `rollstream` is in `folder`."""
    return Machine({**os.environ, "PYTHONPATH": str(folder)}, folder)


NEW = _program(ROOT)


def earlier_program(folder: Path) -> Machine:
    """Unpacks the archived program into `folder`."""
    unpack(PROGRAM_OF_2026_11_23, folder)
    return _program(folder)


@dataclass
class MixedRun(RunDriver):
    """A run whose roles are processes of either program. `processes` are those that should live: a
    wait fails once one of them has ended.
    """

    vital: Sequence[str] = NAMES

    def start_all(self, program: Machine) -> None:
        for name in NAMES:
            self.start(name, host=program)

    def stop(self, name: str) -> None:
        """Stop the process as an orchestrator does; it must not have ended before."""
        process = self.newest(name)
        assert not process.is_over, process.describe()
        process.stop()
        self.processes.remove(process)

    def replace(self, program: Machine, name: str) -> None:
        """Stop the process, start that of `program` in its place, and wait for two more steps."""
        self.stop(name)
        self.start(name, host=program)
        self.wait_for_step(self.step() + 2)

    def wait_refused(self, name: str) -> str:
        """Waits until the process has refused the run; returns what it printed."""
        process = self.newest(name)
        process.wait(REFUSED)
        self.processes.remove(process)
        return process.text


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


def mixed_run(folder: Path, model: Path, more: Sequence[str]) -> MixedRun:
    """A new run without processes; what its processes print is kept beside its folder."""
    configuration = folder.parent / "mixed.toml"
    configuration.write_text('run = "mixed"\n')
    return MixedRun(folder, configuration, [*SETTINGS, f"model.path={model}", *more])
