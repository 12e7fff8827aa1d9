"""Promise 1 at every write: a 20-step run over SQLite and files in one process, killed before or
after one of its writes and restarted.

`python -m testbed.stepped.trials --boundary N --side after` repeats one of them.
"""

import itertools
import random
import time

import pytest

from rollstream.deadline import Deadline
from testbed.stepped.trials import Trial, at_boundary
from tests.support.shares import one_of

SAMPLE = 5


@pytest.fixture(scope="module")
def calm() -> Trial:
    return at_boundary(-1)


def test_the_fixed_run_passes_every_kind_of_write(calm: Trial) -> None:
    """Otherwise a sweep over its writes would leave out the kinds that it never makes."""
    assert not calm.found.wrong
    kinds = {kind.split(" ")[0] for kind in calm.kinds}
    assert kinds == {"append", "commit", "truncate", "create", "swap", "delete"}
    for topic in ("admissions", "assignments", "partials", "trajectories", "ledger", "weights"):
        assert calm.kinds[f"append {topic}"]
    assert calm.kinds["create checkpoints/sN-tN/manifest.json"]
    assert calm.kinds["swap weights/latest.json"]


def test_the_fixed_run_is_the_same_whatever_the_clocks_of_the_machine_show(
    calm: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only then is a write's number the same write in another run. On a machine that is busy
    elsewhere, seconds pass between any two reads of a clock.
    """
    looks = itertools.count()

    def jumping() -> float:
        return 7.0 * next(looks)

    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, jumping)
    monkeypatch.setattr(Deadline.__init__, "__defaults__", (jumping,))
    assert at_boundary(-1).kinds == calm.kinds


@pytest.mark.parametrize("place", one_of(3, range(SAMPLE)))
def test_a_run_killed_at_a_drawn_write_ends_as_without(calm: Trial, place: int) -> None:
    """Invariants 1 to 7; the draw is fixed and spread over the whole run."""
    share = calm.writes / SAMPLE
    boundary = int((place + random.Random(place).random()) * share)
    trial = at_boundary(boundary, ("before", "after")[place % 2])
    assert not trial.found.wrong, str(trial)
    assert trial.found.trained == calm.found.trained


@pytest.mark.long
def test_a_run_killed_at_every_sixth_write_ends_as_without(calm: Trial) -> None:
    """Every write on both sides takes half an hour: `python -m benchmarks chaos`."""
    for number, boundary in enumerate(range(0, calm.writes, 6)):
        trial = at_boundary(boundary, ("before", "after")[number % 2])
        assert not trial.found.wrong, str(trial)
        assert trial.found.trained == calm.found.trained
