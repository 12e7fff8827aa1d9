"""Pure parts: samples from records, advantages, lag, choice of groups, packing, sums."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollstream.consumers.trainer.data.advantages import advantages
from rollstream.consumers.trainer.data.lags import is_dropped, lags_of, mask_by_lag
from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.consumers.trainer.data.selection import (
    GroupCandidate,
    freshest,
    load_choice,
    oldest,
    pack_micro_batches,
)
from rollstream.consumers.trainer.learn.row_layout import token_rows
from rollstream.consumers.trainer.learn.statistics import LossStatistics
from rollstream.errors import ConfigurationError, DecodeError
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Span, Version
from tests.trainer.learning_reference import sample


def record(**changed) -> Trajectory:
    values = {
        "trajectory": "g1-0",
        "group": 1,
        "index": 0,
        "attempt": 0,
        "task": "t",
        "rollout": "r",
        "rollout_term": 1,
        "tokens": np.array([5, 6, 7, 8, 9, 10], np.uint32),
        "sources": np.array([0, 1, 1, 2, 1, 1], np.uint8),
        "logprobs": np.array([-1, -2, -3, -4], np.float32),
        "spans": (Span(0, 3, Version(1, 1)), Span(3, 4, Version(2, 1))),
        "finish": "stop",
        "reward": 0.5,
        "trainer_version": Version(2, 1),
        "started_s": 0.0,
        "finished_s": 1.0,
    }
    return Trajectory(**(values | changed))


def test_a_sample_trains_all_generated_tokens_of_its_record():
    made = sample_of(record(), advantage=2.0)
    assert made.mask.tolist() == [True] * 4
    assert (made.reward, made.advantage, made.temperature) == (0.5, 2.0, 1.0)
    assert sample_of(record(reward=None), 0.0, reward=3.0).reward == 3.0


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"sources": np.array([1, 1, 1, 2, 1, 0], np.uint8)}, "first token"),
        ({"sources": np.array([0, 1], np.uint8)}, "sources"),
        ({"logprobs": np.zeros(3, np.float32)}, "log-probabilities"),
        ({"spans": (Span(0, 3, Version(1, 1)),)}, "tile"),
        ({"spans": (Span(1, 4, Version(1, 1)), Span(0, 1, Version(1, 1)))}, "tile"),
        ({"temperature": 0.0}, "temperature"),
        ({"sources": np.zeros(6, np.uint8), "logprobs": np.zeros(0, np.float32)}, "no generated"),
    ],
)
def test_inconsistent_records_are_refused_by_name(changed, says):
    with pytest.raises(DecodeError, match=f"g1-0.*{says}"):
        sample_of(record(**changed), 0.0)


def test_advantages_of_a_group_by_their_formulas():
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    std = np.std(rewards, ddof=1)
    assert advantages(rewards, "grpo")[0] == pytest.approx(0.6 / (std + 1e-4))
    assert advantages(rewards, "centred").tolist() == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4])
    assert advantages(rewards, "leave_one_out")[1] == pytest.approx(0 - 2 / 4)


@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=9),
    st.sampled_from(["grpo", "centred", "leave_one_out"]),
)
def test_advantages_sum_to_zero_and_equal_rewards_give_none(rewards, kind):
    found = advantages(rewards, kind)
    assert abs(found.sum()) < 1e-6
    if max(rewards) == min(rewards):
        assert np.abs(found).max() < 1e-6


def test_lag_counts_versions_span_by_span():
    made = sample_of(record(), 0.0)
    assert lags_of(made, 4).tolist() == [3, 3, 3, 2]


@given(version=st.integers(2, 9), max_lag=st.none() | st.integers(0, 8))
def test_nothing_above_max_lag_is_trained(version, max_lag):
    """Invariant 5: masked under in-flight policies, dropped under `keep_version`."""
    made = sample_of(record(), 0.0)
    masked = mask_by_lag(made, version, max_lag)
    limit = 100 if max_lag is None else max_lag
    assert (lags_of(made, version)[masked.mask] <= limit).all()
    assert (lags_of(made, version)[~masked.mask] > limit).all()
    assert is_dropped(made, version, max_lag) == (not masked.mask.all())


def test_a_token_masked_before_stays_masked():
    made = replace(sample_of(record(), 0.0), mask=np.array([False, True, True, True]))
    assert mask_by_lag(made, 4, 8).mask.tolist() == [False, True, True, True]


groups = st.lists(
    st.builds(GroupCandidate, st.integers(0, 50), st.integers(0, 5)), unique_by=lambda c: c.group
)


@given(groups, st.integers(0, 8), st.randoms())
def test_choice_does_not_depend_on_the_order_of_arrival(candidates, count, random):
    shuffled = random.sample(candidates, len(candidates))
    for rule in (oldest, freshest):
        chosen = rule(candidates, count)
        assert chosen == rule(shuffled, count)
        assert len(chosen) == len(set(chosen)) == min(count, len(candidates))


def test_oldest_takes_small_versions_first_then_small_numbers():
    candidates = [
        GroupCandidate(7, 2),
        GroupCandidate(9, 1),
        GroupCandidate(3, 2),
        GroupCandidate(4, 5),
    ]
    assert oldest(candidates, 3) == [9, 3, 7]
    assert freshest(candidates, 3) == [4, 3, 7]


def test_a_rule_of_ones_own_is_loaded_by_path(tmp_path, monkeypatch):
    text = "def last(candidates, n):\n    return [c.group for c in candidates][-n:]\n"
    (tmp_path / "my_choice.py").write_text(text + "def wrong(candidates, n):\n    return [999]\n")
    monkeypatch.syspath_prepend(tmp_path)
    candidates = [GroupCandidate(7, 2), GroupCandidate(9, 1)]
    assert load_choice("my_choice:last")(candidates, 1) == [9]
    assert load_choice("oldest") is oldest
    with pytest.raises(ConfigurationError, match="out of those offered"):
        load_choice("my_choice:wrong")(candidates, 1)


@pytest.mark.parametrize("name", ["newest", "no_such_module:f", "math:no_such", "math:pi", ":"])
def test_a_choice_that_imports_nothing_is_refused_with_what_to_do(name):
    with pytest.raises(ConfigurationError, match=r"trainer\.choose"):
        load_choice(name)


@given(st.integers(0, 2**32 - 1), st.integers(0, 30), st.integers(8, 120), st.randoms())
def test_packing_is_exact_bounded_and_independent_of_order(seed, count, tokens_max, random):
    rng = np.random.default_rng(seed)
    made = [sample(rng, f"t{i}", turn_count=1 + i % 3) for i in range(count)]
    batches = pack_micro_batches(made, tokens_max)
    names = [[one.trajectory for one in batch] for batch in batches]
    assert sorted(name for batch in names for name in batch) == sorted(
        one.trajectory for one in made
    )
    assert all(len(b) == 1 or sum(map(len, b)) <= tokens_max for b in batches)
    again = pack_micro_batches(random.sample(made, count), tokens_max)
    assert names == [[one.trajectory for one in batch] for batch in again]


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_rows_hold_every_token_once_and_little_padding(seed, count):
    rng = np.random.default_rng(seed)
    made = [sample(rng, f"t{i}", turn_count=1 + i % 3) for i in range(count)]
    rows = token_rows(made)
    trained = [one.tokens[one.sources == 1][one.mask] for one in made]
    before = [one.tokens[np.flatnonzero(one.sources == 1)[one.mask] - 1] for one in made]
    assert rows.targets.tolist() == np.concatenate(trained).tolist()
    assert rows.tokens[rows.scored].tolist() == np.concatenate(before).tolist()
    assert len(rows.tokens) - sum(len(one) - 1 for one in made) <= 24 * len(rows.blocks)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=6))
def test_sums_combine_to_the_whole(parts):
    added = sum((LossStatistics(loss=a, tokens=a, ratio_max=b) for a, b in parts), LossStatistics())
    assert added == LossStatistics(
        loss=sum(a for a, _ in parts),
        tokens=sum(a for a, _ in parts),
        ratio_max=max(b for _, b in parts),
    )
