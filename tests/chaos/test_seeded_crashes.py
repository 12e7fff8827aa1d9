"""Promise 1 under random orders: short runs in memory, with turns, kills, freezes and late zombies
drawn from a seed.

`python -m testbed.stepped.trials --seed S` repeats one; `python -m benchmarks chaos` runs 3 000.
"""

import pytest

from testbed.stepped.batches import seeded_batches
from testbed.stepped.trials import seeded

COUNTS = [8, pytest.param(25, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.long)]


@pytest.mark.parametrize("count", COUNTS)
def test_seeded_runs_keep_every_promise(count: int) -> None:
    """Invariants 1 to 7; a line of `wrong` names the command that repeats its run. In some of them
    rollouts fill a draft history, and its writer dies like all others.
    """
    findings = seeded_batches(count)
    assert findings.wrong == []
    happened = ("killed", "frozen", "all killed", "histories taken over")
    assert min(findings.happened[what] for what in happened) > count // 10


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = seeded(3), seeded(3)
    assert first.kinds == second.kinds
    assert first.happened == second.happened
