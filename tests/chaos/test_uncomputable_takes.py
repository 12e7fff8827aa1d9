"""A trajectory that the learner cannot compute does not hold a run, under kills of all roles
(invariant 12, last sentence).
"""

import pytest

from rollstream.consumers.trainer.data.poisoned_takes import FAILED_MAX
from rollstream.storage.archive.log_view import LogView
from rollstream.streams.records import GroupClosed, TakeFailed
from testbed.memory import MemoryBus, MemoryStore
from testbed.stepped.baton import Baton
from testbed.stepped.crashes import Drawn, Rates
from testbed.stepped.run import RUN, Shape, SteppedRun
from testbed.stepped.trials import scratch_folder, tried

GROUP = 3
SHAPE = Shape(  # each sample is a micro-batch: no other group is in the one that fails
    4, 2, 2, checkpoint_every=2, micro_batch_tokens=1, uncomputable=f"{GROUP}.0"
)
RATES = Rates(kill=0.04, freeze=0.02, all_at_once=0.008)


@pytest.mark.parametrize(("seed", "kills"), [(0, 0), (1, 8), (2, 8), (3, 8)])
def test_its_group_ends_dead_and_every_other_group_is_trained(seed: int, kills: int) -> None:
    """`findings`: steps × groups are trained, each trajectory once, and the audit is clean."""
    with scratch_folder() as folder:
        baton = Baton(seed)
        medium = (MemoryBus(baton.clock), MemoryStore())
        run = SteppedRun(lambda: medium, folder, baton, SHAPE)
        plan = run.plan = Drawn(baton, run.alive, RATES, most=kills)
        trial = tried(run, f"seed {seed}", plan)
        assert trial.found.wrong == []
        assert trial.found.poisoned.keys() == {GROUP}
        assert trial.found.trained == SHAPE.steps * SHAPE.groups
        ledger = [each.record for each in LogView(*medium, RUN).topic("ledger").records()]
        closed = [record for record in ledger if isinstance(record, GroupClosed)]
        dead = [record for record in closed if record.reason == "dead"]
        assert [(record.group, record.detail[:10]) for record in dead] == [(GROUP, "poisoned: ")]
        if not kills:
            assert run.asked["trainer failed"] >= FAILED_MAX
        # A trainer that has recorded its failure may be killed before it ends.
        assert sum(isinstance(record, TakeFailed) for record in ledger) >= FAILED_MAX
        assert sum(plan.happened.values()) == kills
