"""Invariant 4 while the only holders of versions are killed: an empty rollout loads the version
from history, or the trajectory restarts; it never has two versions.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.folds import InvariantResult
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.storage.archive.log_view import LogView
from rollstream.streams.records import Assignment, Record, Trajectory
from testbed.memory import MemoryBus, MemoryStore
from testbed.stepped.baton import Baton, Process
from testbed.stepped.crashes import Drawn, Rates, Side
from testbed.stepped.findings import findings
from testbed.stepped.run import MAX_LAG, RUN, Shape, SteppedRun

SEEDS = range(6)
SHAPE = Shape(steps=6, groups=2, samples=3, checkpoint_every=3, keep_version=True, is_slow=True)


class OnlyRollouts(Drawn):
    """One in twenty of their writes is their last."""

    def passes(self, side: Side, process: Process, kind: str) -> None:
        if process.name.startswith("rollout"):
            super().passes(side, process, kind)


def killed_run(seed: int, folder: Path) -> SteppedRun:
    """Runs to the end."""
    baton = Baton(seed)
    medium = (MemoryBus(baton.clock), MemoryStore())
    run = SteppedRun(lambda: medium, folder, baton, SHAPE)
    run.plan = OnlyRollouts(baton, run.alive, Rates(0.05, 0.0, 0.0), most=12)
    run.run()
    return run


def _records(run: SteppedRun, topic: str) -> list[Record | None]:
    return [one.record for one in LogView(run.bus, run.store, RUN).topic(topic).records()]


def audited(run: SteppedRun) -> list[InvariantResult]:
    return Audit(run.bus, run.store, RUN, AuditPolicy(MAX_LAG, keep_version=True)).check()


@pytest.mark.slow
def test_a_trajectory_that_loses_the_only_holder_of_its_version_resumes_under_it_or_restarts(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    happened: Counter[str] = Counter()
    for seed in SEEDS:
        run = killed_run(seed, tmp_path)
        assert findings(run.bus, run.store, SHAPE).wrong == [], seed
        orders = {
            (o.trajectory, o.attempt): o
            for o in _records(run, "assignments")
            if isinstance(o, Assignment) and o.kind != "release"
        }
        for done in _records(run, "trajectories"):
            assert isinstance(done, Trajectory)
            order = orders.get((done.trajectory, done.attempt))
            assert len(done.spans) <= 1, f"seed {seed}: {done.trajectory} has two versions"
            if order is not None and order.from_history:
                happened["finished"] += 1
                assert [span.version for span in done.spans] == [order.version], seed
        (dispatch,) = [one for one in audited(run) if one.number == 4]
        assert dispatch.counts["loaded from history"] == sum(
            o.from_history for o in orders.values()
        )
        happened["loaded for"] += dispatch.counts["loaded from history"]
        happened["started again"] += dispatch.counts["started again"]
    assert min(happened[what] for what in ("loaded for", "finished", "started again")) > 0, happened
