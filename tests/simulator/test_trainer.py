"""The simulated trainer: when a step that starts early takes groups, and what it leaves out."""

import pytest

from rollstream.simulator.cache import KvCache
from rollstream.simulator.replica import Replica
from rollstream.simulator.results import SimulatedTrainer
from rollstream.simulator.workload import SimulatedTrajectory
from tests.simulator.small import STEADY, run


def trained(*spans: tuple[int, int]) -> SimulatedTrajectory:
    """An answer with these (version, tokens), behind a prompt of 10 tokens."""
    tokens = sum(count for _, count in spans)
    return SimulatedTrajectory("t", 0, 0, 10, tokens, done=tokens, spans=list(spans))


def trainer(max_lag: int | None = None, micro_batch_tokens: int = 0) -> SimulatedTrainer:
    return SimulatedTrainer(3, 0.5, 0.001, True, max_lag, micro_batch_tokens)


def test_a_step_that_starts_early_takes_groups_once_they_fill_a_micro_batch():
    """90 + 10 tokens a group: two fill a micro-batch of 200; the last one completes the step."""
    one = trainer(micro_batch_tokens=200)
    one.receive(0, [trained((0, 90))])
    assert one.begin(0.0) is None
    one.receive(1, [trained((0, 90))])
    assert one.begin(1.0) == pytest.approx(0.2)
    assert one.end(1.2) is None
    one.receive(2, [trained((0, 90))])
    assert one.begin(2.0) == pytest.approx(0.1 + 0.5)
    step = one.end(2.6)
    assert step is not None
    assert (step.begun_s, step.tokens) == (1.0, 270)


def test_without_the_size_of_a_micro_batch_the_first_group_starts_a_step():
    one = trainer()
    one.receive(0, [trained((0, 90))])
    assert one.begin(0.0) == pytest.approx(0.1)


def test_tokens_above_the_bound_are_masked_and_samples_without_others_dropped():
    """At version 3 with a bound of 1 tokens of version 2 count; the group with none expires."""
    one = trainer(max_lag=1)
    one.version = 3
    one.receive(0, [trained((0, 50), (1, 50))])
    one.receive(1, [trained((0, 50), (2, 40)), trained((1, 50))])
    seconds = one.begin(0.0)
    assert seconds == pytest.approx(0.1)
    assert (one.expired, one.samples, one.dropped) == (1, 1, 1)


def test_use_of_the_cache_is_also_known_for_the_time_in_which_it_holds_anything():
    """A rollout without work lowers the mean over time, not that over the time with tokens."""
    result = run("laminar", train_fixed_s=60.0)
    assert result.idle_share > 0.3
    assert result.kv_utilisation_held > 1.3 * result.kv_utilisation
    replica = Replica("r", STEADY, 2, 1_000, 0, cache=KvCache())
    replica.submit(SimulatedTrajectory("a", 0, 0, 10, 100), 0.0)
    while replica.due_s is not None:
        now_s = replica.due_s
        replica.finish_jump(now_s)
        replica.start_jump(now_s)
    assert replica.totals(5.0).held_s == pytest.approx(1.0)
