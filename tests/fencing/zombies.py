"""A process of a role that is stopped before one of its writes, a successor that takes over, and
the first one resuming: the same for every role and every back end.

1. The process stops itself (SIGSTOP) just before the write. 2. Its successor starts, waits for the
lease to expire where there is one, and makes writes of that kind. 3. SIGCONT: the write of the old
term is made now, behind the successor's `Opened`.
"""

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.pointer import read_pointer
from testbed.kills.aims import Aim
from testbed.kills.final_counts import Counted, counted
from testbed.run_driver import RunDriver, RunProcess
from testbed.run_process import GROUPS

STEPS = 12
SETTINGS = [
    f"trainer.steps={STEPS}", "trainer.samples_per_group=2", "sampling.tokens_max=16",
    "rollouts.count=1", "rollouts.partial_tokens=4", "checkpoints.every=2", "checkpoints.keep=1",
    "weights.versions_max=6", "archive.roll_s=0.4", "trainer.lease_s=2", "dispatch.lease_s=2",
]  # fmt: skip
TRAJECTORIES = "archive/topic=trajectories/run=tiny/date=N-N-N/trajectories-N-N.parquet"
ENDED = re.compile(
    r"lease of term \d+ was lost|must exit|was taken by a later dispatch|is not completed: term"
    r"|decides what stays|was truncated, kept are"
)
"""The log of a process that met the higher term, or first found the records truncated that it was
about to read.
"""


@dataclass(frozen=True)
class Zombie:
    """A role and the write before which it stops; `acts` is the number of writes of that kind that
    its successor makes before the first resumes.

    A role that `exits` meets the higher term and logs so; in topics of one writer (`voids`) the
    records that it appends under its own term are void.
    """

    name: str
    kind: str
    nth: int
    acts: int = 1
    voids: bool = False
    exits: bool = True

    @property
    def aim(self) -> Aim:
        return Aim(self.name, self.kind, "before", self.nth, "STOP")


ONE_EACH = (
    Zombie("trainer", "append ledger", 7, acts=4, voids=True),
    Zombie("dispatch", "append admissions", 4, acts=2, voids=True),
    Zombie("prompts", "append prompts", 3, acts=2, voids=True),
    Zombie("archive", f"create {TRAJECTORIES}", 2),
    Zombie("rollout-0", "append trajectories", 3),
)
"""Writes of every role of every run."""
AT_TRUTH = (
    Zombie("trainer", "swap weights/latest.json", 3, acts=2),
    Zombie("dispatch", "swap dispatch/state.json", 2),
    Zombie("relay", "append status", 6, acts=3),
)
"""Writes decided by a swap, and a relay's."""
AT_ORDERS = (
    Zombie("trainer", "create checkpoints/sN-tN/manifest.json", 3),
    Zombie("dispatch", "append assignments", 4, acts=2, voids=True),
    Zombie("scorer-0", "append annotations", 3, exits=False),
)
"""The write that completes a checkpoint, assignments, and a scorer's, which has no term."""
EXTRA = {
    "relay": ["relay.enabled=true", "relay.status_s=0.2", "relay.timeout_s=1"],
    "scorer-0": ["scoring.count=1", "task.reward=late"],
}


def start_all(run: RunDriver, zombies: tuple[Zombie, ...]) -> dict[str, RunProcess]:
    """The roles of a run started by hand; those named by the zombies will stop."""
    run.aims.aim(*(zombie.aim for zombie in zombies))
    extra = [zombie.name for zombie in zombies if zombie.name in EXTRA]
    names = [*extra, "trainer", "rollout-0", "dispatch", "prompts", "archive"]
    return {name: run.start(name) for name in names}


def haunt(run: RunDriver, zombies: Sequence[Zombie], processes: Mapping[str, RunProcess]) -> None:
    """Starts a second process of each name as soon as the first is stopped. The first resumes as
    soon as the second has acted, makes its pending write, and exits where it must.
    """
    waiting, successors = list(zombies), dict[Zombie, RunProcess]()

    def all_went_on() -> bool:
        for zombie in [one for one in waiting if processes[one.name].is_stopped()]:
            waiting.remove(zombie)
            node = other_node(run) if zombie.name == "relay" else None
            successors[zombie] = run.start(zombie.name, folder=node)
        for zombie in [one for one, successor in successors.items() if _acts(run, one, successor)]:
            del successors[zombie]
            processes[zombie.name].send_signal(signal.SIGCONT)
        return not waiting and not successors

    run.wait_for(all_went_on)
    for exiting in [processes[zombie.name] for zombie in zombies if zombie.exits]:
        exiting.wait(code=1)
        assert ENDED.search(exiting.text), exiting.describe()


def _acts(run: RunDriver, zombie: Zombie, successor: RunProcess) -> bool:
    """Whether it has exited as expected; one that completed the run meanwhile has, too."""
    assert not successor.process.poll(), successor.describe()
    return run.aims.writes(zombie.name, successor.pid)[zombie.kind] >= zombie.acts


def other_node(run: RunDriver) -> Path:
    """A folder of the same run as another machine has it, with memory of its own."""
    node = run.folder.parent / "node-2"
    node.mkdir()
    values = json.loads((run.folder / "config.json").read_text())
    for place in ("bus", "store"):
        scheme, _, rest = values[place].partition(":")
        if scheme in ("sqlite", "file"):
            values[place] = f"{scheme}:{run.folder / rest}"
    (node / "config.json").write_text(json.dumps(values))
    return node


@dataclass
class ForwardOnly:
    """Called repeatedly, it checks that the pointer's term and version only grow (invariant 6)."""

    store: ObjectStore
    term: int = 0
    number: int = -1

    def __call__(self) -> None:
        present = read_pointer(self.store)
        if present is None:
            return
        version = present[0].version
        now = (present[0].term, -1 if version is None else version.number)
        assert now[0] >= self.term
        assert now[1] >= self.number
        self.term, self.number = now


def assert_no_harm(folder: Path) -> Counted:
    """The run is whole, as without a zombie."""
    found = counted(folder, STEPS)
    assert found.is_clean, found.wrong
    assert found.trained == STEPS * GROUPS
    return found
