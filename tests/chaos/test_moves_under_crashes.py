"""Promise 1 while everything moves: dispatch asks trajectories back at every look, and roles are
killed, frozen and resumed as zombies meanwhile.

`python -m testbed.stepped.trials --seed S --restless` repeats one.
"""

from collections import Counter

import pytest

from testbed.stepped.trials import seeded

COUNTS = [pytest.param(5, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.long)]


@pytest.mark.parametrize("count", COUNTS)
def test_runs_that_move_all_the_time_keep_every_promise(count: int) -> None:
    """Invariants 1 to 7: one completion per trajectory whichever rollout finishes it, one version
    under `keep_version`.
    """
    happened: Counter[str] = Counter()
    for seed in range(count):
        trial = seeded(seed, restless=True)
        assert trial.found.wrong == [], str(trial)
        happened += trial.happened
    assert happened["asked back"] > 10 * count
    assert min(happened[what] for what in ("killed", "frozen", "put off")) > count
