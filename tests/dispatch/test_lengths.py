"""Expected lengths of answers, placement by them, and outliers: advice only, so never more than the
room there is, and nothing without history.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, strategies as st

from rollstream.consumers.dispatch.lengths import (
    SAMPLES_SMOOTHED,
    ExpectedLength,
    LengthHistory,
)
from rollstream.consumers.dispatch.placement import (
    PlacementWork,
    RolloutRoom,
    RolloutSpeed,
    WaveLayout,
    end_times,
    lay_out_wave,
    place_samples,
    share_out,
)
from rollstream.consumers.dispatch.repack import RolloutLoad, RunningRequest, plan_outliers
from rollstream.streams.records import Prompt
from rollstream.streams.values import Sampling, Version

V3 = Version(3, 1)


def prompt(number: int, task: str = "remainder") -> Prompt:
    return Prompt(number, task, np.array([number], np.uint32), 4, Sampling(), 0)


def test_earlier_passes_over_a_prompt_predict_its_length():
    lengths = LengthHistory()
    for tokens in (90, 110):
        lengths.note(prompt(1), tokens)
    expected = lengths.expected(prompt(1))
    assert expected == ExpectedLength(100.0, 10.0, 2)
    assert lengths.expected(replace_group(prompt(1), 77)) == expected


def replace_group(known: Prompt, group: int) -> Prompt:
    """The same prompt in a later pass."""
    return Prompt(group, known.task, known.tokens, 4, Sampling(), 0, epoch=1)


def test_without_an_earlier_pass_the_longest_of_the_group_so_far_is_the_estimate():
    lengths = LengthHistory()
    for tokens in (10, 80):
        lengths.note(prompt(1), tokens)
    expected = lengths.expected(prompt(1), finished=[10, 80])
    assert expected is not None
    assert expected.mean == 80


def test_an_earlier_pass_counts_however_many_samples_of_the_group_are_finished():
    lengths = LengthHistory()
    for _ in range(3 * SAMPLES_SMOOTHED):
        lengths.note(prompt(1), 50)
    finished = [10] * SAMPLES_SMOOTHED + [400]
    expected = lengths.expected(prompt(1), finished=finished)
    assert expected is not None
    assert expected.mean == 50


def test_an_unknown_prompt_is_expected_as_its_task_is_and_an_unknown_task_not_at_all():
    lengths = LengthHistory()
    lengths.note(prompt(1), 50)
    expected = lengths.expected(prompt(2))
    assert expected is not None
    assert expected.mean == 50
    assert lengths.expected(prompt(2, "chess")) is None


def test_a_history_is_the_same_after_it_was_written_down():
    lengths = LengthHistory()
    for number in range(20):
        lengths.note(prompt(number % 3), number)
    again = LengthHistory(lengths.known())
    assert again.known() == lengths.known()


@given(samples=st.lists(st.integers(1, 1000), min_size=40, max_size=80))
def test_a_mean_follows_the_newest_samples(samples: list[int]):
    lengths = LengthHistory()
    for tokens in [*samples, *[5000] * 200]:
        lengths.note(prompt(1), tokens)
    expected = lengths.of_prompt(prompt(1))
    assert expected is not None
    assert expected.mean > 4900
    assert expected.spread >= 0


times = st.integers(1, 6).flatmap(
    lambda groups: st.tuples(
        st.lists(st.floats(1, 1e5), min_size=groups, max_size=groups).map(sorted),
        st.integers(groups, 20),
    )
)


@given(case=times)
def test_every_group_gets_a_rollout_and_all_are_given(case: tuple[list[float], int]):
    longest, workers = case
    shares = share_out(end_times(longest, 64, workers, lambda b: 1 + b / 8))
    assert sum(shares) == workers
    assert min(shares) >= 1


def test_long_groups_get_more_rollouts_so_that_they_end_in_a_ramp():
    longest, workers = [100.0, 200.0, 400.0, 1600.0], 16
    ends = end_times(longest, 64, workers, lambda b: 1 + b / 8)
    shares = share_out(ends)
    assert shares[-1] > shares[0]
    even = max(ends[g, 3] for g in range(4))
    assert max(ends[g, n - 1] for g, n in enumerate(shares)) < even


workers_ = st.lists(st.tuples(st.floats(0.5, 4), st.booleans()), min_size=1, max_size=12).map(
    lambda many: [RolloutSpeed(f"r{i:02d}", s, p) for i, (s, p) in enumerate(many)]
)
means_ = st.lists(st.floats(1, 1e4), min_size=1, max_size=40)


@given(means=means_, workers=workers_, ascending=st.booleans())
def test_a_layout_names_every_rollout_once(
    means: list[float], workers: list[RolloutSpeed], ascending: bool
):
    layout = lay_out_wave(means, workers, ascending, samples=8, slots=16)
    if layout is None:
        return
    named = [name for group in layout.groups for name in group]
    assert sorted(named) == [w.rollout for w in workers]
    assert all(layout.groups)


def test_consecutive_waves_are_laid_out_in_opposite_directions():
    workers = [RolloutSpeed(f"r{i}") for i in range(4)]
    one = lay_out_wave([10, 20, 30, 4000], workers, True, 8, 16)
    other = lay_out_wave([10, 20, 30, 4000], workers, False, 8, 16)
    assert one is not None
    assert other is not None
    assert one.groups[0][0] == other.groups[-1][-1] == "r0"


def test_preemptible_rollouts_keep_the_short_end_in_every_wave():
    workers = [
        RolloutSpeed("a"),
        RolloutSpeed("b"),
        RolloutSpeed("c", preemptible=True),
        RolloutSpeed("d"),
    ]
    for ascending in (True, False):
        layout = lay_out_wave([10, 20, 30, 4000], workers, ascending, 8, 16)
        assert layout is not None
        assert "c" in layout.groups[0]


def test_a_ranked_wave_goes_where_its_lengths_belong_and_elsewhere_before_it_waits():
    layout = WaveLayout((10.0, 20.0, 100.0, 200.0), (("a",), ("b",)))
    works = [
        PlacementWork(("short",), 10.0, layout=layout),
        PlacementWork(("x", "y"), 200.0, layout=layout),
    ]
    plan = place_samples(works, [RolloutRoom("a", 2), RolloutRoom("b", 1)])
    assert plan == {"short": "a", "x": "b", "y": "a"}


def test_work_goes_to_the_rollout_that_is_done_first_and_fast_ones_are_done_sooner():
    rooms = [RolloutRoom("slow", 8, 100, 1.0), RolloutRoom("fast", 8, 150, 2.0)]
    plan = place_samples([PlacementWork(("0.0",), 40.0), PlacementWork(("1.0",), 40.0)], rooms)
    assert plan == {"0.0": "fast", "1.0": "fast"}


def test_long_and_unknown_work_keeps_off_preemptible_rollouts():
    rooms = [RolloutRoom("steady", 1), RolloutRoom("passing", 8, preemptible=True)]
    works = [PlacementWork(("long",), 900.0), PlacementWork(("short",), 10.0, is_short=True)]
    assert place_samples(works, rooms) == {"long": "steady", "short": "passing"}


def running(name: str, rollout: str, generated: int, **changed: object) -> RunningRequest:
    one = RunningRequest(
        name, rollout, V3, generated, generated + 10, ExpectedLength(100, 10, 8), 0.05, 2
    )
    return replace(one, **changed)  # type: ignore[arg-type]


def load(name: str, count: int, kv: int) -> RolloutLoad:
    return RolloutLoad(name, V3, count, 0, kv, kv + 1, 1000, 8)


def test_outliers_gather_where_most_of_them_are():
    tail = [running("0.0", "a", 300), running("1.0", "b", 300), running("2.0", "b", 300)]
    moves, _ = plan_outliers(tail, [load("a", 1, 310), load("b", 2, 620)])
    assert moves == {"0.0": "b"}


def test_what_is_within_history_unknown_or_early_in_its_wave_is_no_outlier():
    tail = [
        running("0.0", "a", 110),
        running("1.0", "a", 300, expected=None),
        running("2.0", "a", 300, unfinished=0.5),
        running("3.0", "b", 300),
    ]
    assert plan_outliers(tail, [load("a", 3, 700), load("b", 1, 200)])[0] == {}


tails = st.lists(st.tuples(st.integers(0, 4), st.integers(50, 500), st.integers(2, 3)), max_size=16)


@given(tail=tails)
def test_gathering_keeps_versions_apart_and_bounds(tail: list[tuple[int, int, int]]):
    versions = {f"r{i}": Version(2 + i % 2, 1) for i in range(5)}
    many = [
        running(f"{i}.0", f"r{at}", tokens, version=versions[f"r{at}"])
        for i, (at, tokens, _) in enumerate(tail)
    ]
    held = {n: [r for r in many if r.rollout == n] for n in versions}
    loads = [
        RolloutLoad(n, versions[n], len(held[n]), 0, sum(r.kv for r in held[n]), 99999, 1000, 6)
        for n in versions
    ]
    moves, _ = plan_outliers(many, loads)
    by_name = {r.trajectory: r for r in many}
    assert not {by_name[t].rollout for t in moves} & set(moves.values())
    for n in set(moves.values()):
        came = [by_name[t] for t, to in moves.items() if to == n]
        assert all(r.version == versions[n] for r in came)
        assert sum(r.kv for r in held[n] + came) <= 1000
        assert len(held[n] + came) <= 6


def test_a_ramp_grows_with_length():
    shares = share_out(end_times([10.0, 100.0, 1000.0], 30, 9, lambda b: 1 + b))
    assert all(a <= b for a, b in pairwise(shares))
