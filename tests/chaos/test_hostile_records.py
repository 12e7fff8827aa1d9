"""Invariant 12: no record appended to a topic of many writers ends a role or a run, or changes the
training.

`python -m benchmarks hostile` does the same to real processes over SQLite and Kafka.
"""

import pytest

from testbed.hostile.stepped import hostile_trial


@pytest.mark.parametrize("seed", range(4))
def test_hostile_records_change_nothing(seed: int) -> None:
    trial, _ = hostile_trial(seed, 600)
    assert not trial.found.wrong, str(trial)
