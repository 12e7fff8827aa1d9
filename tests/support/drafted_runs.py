"""A run with drafts on, as real processes: which rollout fills the node's history, that rollout's
death in the middle of an insertion, and the log's records of drafts and moves afterwards.
"""

import socket
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from rollstream.producers.drafts.shared_memory import (
    HEADER_BYTES,
    HISTORY_FILE,
    WRITER_WORD,
    segment_folder,
)
from rollstream.streams.records import Assignment, Trajectory
from rollstream.streams.values import accepted_tokens
from testbed.kills.aims import Aim, AimFolder
from testbed.kills.moments import FILL
from testbed.run_driver import RunDriver
from testbed.run_process import read
from testbed.stepped.crashes import Side

MODULE = "testbed.kills.aimed_drafts"
RUN = "drafted"
TASK = f"""run = "{RUN}"
[task]
options = {{ prompts = 6 }}
"""
SETTINGS = [
    "warmup.enabled=false", "evaluation.enabled=false", "rollouts.drafts=history",
    "rollouts.drafts_tokens=16384", "rollouts.drafts_window=additive",
    "rollouts.on_update=keep_version", "rollouts.status_s=0.1",
    "rollouts.partial_tokens=8", "weights.dtype=float32", "weights.versions_max=32",
    "trainer.lr=1e-6", "trainer.workers=1", "checkpoints.every=4", "dispatch.max_lag=null",
    "dispatch.repack_every_s=0.1", "dispatch.lease_s=2", "dispatch.heartbeat_timeout_s=2",
    "dispatch.keep_s=3600", "archive.roll_s=1",
]  # fmt: skip
"""Every version stays in the store, every assignment and prompt in the log."""


class DraftedRun(RunDriver):
    """A run that shares a history of drafts."""

    @property
    def history(self) -> Path:
        """The folder in memory."""
        return segment_folder(RUN, self.folder, socket.gethostname())

    def writer(self) -> psutil.Process | None:
        """The living rollout that the history itself names."""
        pid = writer_of(self.history / HISTORY_FILE)
        for child in psutil.Process(self.newest().pid).children():
            with suppress(psutil.NoSuchProcess):  # it dies just now
                if child.pid == pid and "--name" in child.cmdline():  # a zombie has none
                    return child
        return None

    def kill_writer(self, side: Side) -> str:
        """Kills it at its next insertion, right before or after its patterns enter the table;
        returns its name once another process writes. A rollout that died of something else before
        does not count.
        """
        while True:
            name, pid = self._known_writer()
            self.aims.aim(Aim(name, FILL, side, nth=0))
            number = len(self.aims.aims) - 1
            self._wait_for_another(pid)
            if self.aims.fired()[number]:
                return name

    def kill_writer_anywhere(self) -> str:
        """Kills it at any moment; returns its name once another process writes."""
        name, pid = self._known_writer()
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
        self._wait_for_another(pid)
        return name

    def _known_writer(self) -> tuple[str, int]:
        while True:
            self.wait_for(self.writer)
            with suppress(psutil.NoSuchProcess, ValueError):  # it dies just now
                if (found := self.writer()) is not None:
                    words = found.cmdline()
                    return words[words.index("--name") + 1], found.pid

    def _wait_for_another(self, pid: int) -> None:
        self.wait_for(lambda: (found := self.writer()) is not None and found.pid != pid)


def drafted_run(base: Path, model: Path, settings: Sequence[str], aims: AimFolder) -> DraftedRun:
    """The run in this folder, without processes."""
    configuration = base / "drafted.toml"
    configuration.write_text(TASK)
    given = [*SETTINGS, f"model.path={model}", *settings]
    return DraftedRun(base / "run", configuration, given, module=MODULE, aim_folder=aims)


def writer_of(file: Path) -> int:
    """The process named in the header of a history; 0 without one."""
    with suppress(OSError), file.open("rb") as opened:
        header = array("q", opened.read(HEADER_BYTES))
        return header[WRITER_WORD] if len(header) > WRITER_WORD else 0
    return 0


def completions(folder: Path) -> dict[str, Trajectory]:
    """The completion of each trajectory that counts (invariant 2)."""
    found: dict[str, Trajectory] = {}
    for record in read(folder, "trajectories", Trajectory):
        found.setdefault(record.trajectory, record)
    return found


def continued(folder: Path) -> tuple[set[str], set[str]]:
    """Trajectories that were resumed elsewhere from their partials: those that were released for it
    (repack), and those whose rollout had died.
    """
    orders: list[Assignment] = read(folder, "assignments", Assignment)
    asked = {(o.trajectory, o.attempt) for o in orders if o.kind == "release" and o.onward}
    resumed = {(o.trajectory, o.attempt - 1) for o in orders if o.kind == "resume"}
    moved, lost = resumed & asked, resumed - asked
    return {name for name, _ in moved}, {name for name, _ in lost}


def accepted_after(records: Sequence[Trajectory], since_s: float) -> int:
    """Accepted draft tokens in trajectories that started later."""
    late = [one for one in records if one.started_s > since_s and one.attempt == 1]
    return sum(accepted_tokens(one.drafts) for one in late if one.drafts is not None)
