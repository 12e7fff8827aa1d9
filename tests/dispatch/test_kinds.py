"""Rollouts of unlike machines: kinds are found from reports in equal batches, fast kinds get the
long answers, short ones do not wait for them, and no request moves to a slower kind.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, strategies as st

from rollstream.consumers.dispatch.admission import room_to_admit
from rollstream.consumers.dispatch.kinds import SpeedReports, relative_speeds, speed_kinds
from rollstream.consumers.dispatch.layouts import WaveLayouts, rollout_speeds
from rollstream.consumers.dispatch.lengths import ExpectedLength, LengthHistory
from rollstream.consumers.dispatch.placement import (
    PlacementWork,
    RolloutRoom,
    RolloutSpeed,
    WaveLayout,
    lay_out_wave,
    place_samples,
)
from rollstream.consumers.dispatch.repack import (
    RepackMove,
    RolloutLoad,
    RunningRequest,
    plan_outliers,
    plan_repack,
)
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.streams.records import RolloutStatus
from rollstream.streams.values import Version

V3 = Version(3, 1)
UNLIKE = [
    RolloutSpeed("slow", 0.2, kind=0, slots=4),
    RolloutSpeed("middle", 0.4, kind=1, slots=4),
    RolloutSpeed("fast", 1.0, kind=2, slots=4),
]
MEANS = [float(n) for n in range(100, 2100, 100)]


def reports(speed: float, batches: range, noise: float = 0.0) -> SpeedReports:
    """A machine of this speed, whose requests are faster in smaller batches."""
    found = SpeedReports()
    for turn in range(12):
        for running in batches:
            own = speed * (1 + noise * (-1) ** turn) / (10 + running)
            found = found.with_report(running, own * running)
    return found


def status(name: str, running: int, tokens_per_s: float, **changed: object) -> RolloutStatus:
    values: dict[str, object] = {
        "slots": 16, "waiting": 0, "kv_used": 0, "kv_capacity": 1000, "version": V3,
        "verified": True, "health": "generating", "quota_left": 8, "tokens_total": 0,
        "idle_s": 0.0, "time_s": 0.0,
    }  # fmt: skip
    return RolloutStatus(name, 1, running=running, tokens_per_s=tokens_per_s, **(values | changed))  # type: ignore[arg-type]


def state_of(speeds: Mapping[str, float], **changed: object) -> DispatchState:
    state = DispatchState()
    for turn in range(8):
        for name, speed in speeds.items():
            for running in (4, 8, 16):
                made = speed * running / (10 + running)
                state.apply_status(status(name, running, made, **changed), float(turn))
    return state


# ---- kinds -----------------------------------------------------------------------------------


def test_a_small_batch_makes_no_fast_machine() -> None:
    """One rollout is full, the other drains: its requests are three times as fast."""
    found = relative_speeds({"a": reports(1, range(8, 65)), "b": reports(1, range(1, 20))})
    assert speed_kinds(list(found.values())) == (0, 0)


def test_machines_are_ordered_by_speed_whatever_their_batches() -> None:
    found = relative_speeds({
        "slow": reports(0.1, range(1, 20), 0.2),
        "fast": reports(1, range(8, 65), 0.2),
        "other": reports(0.9, range(4, 65), 0.2),
        "middle": reports(0.3, range(2, 33), 0.2),
    })  # fmt: skip
    assert dict(zip(found, speed_kinds(list(found.values())), strict=True)) == {
        "slow": 0, "middle": 1, "fast": 2, "other": 2,
    }  # fmt: skip
    assert 8 < found["fast"] / found["slow"] < 12


def test_a_rollout_that_cannot_be_compared_counts_as_equal() -> None:
    found = relative_speeds({"a": reports(1, range(1, 3)), "b": reports(9, range(40, 60))})
    assert found == {"a": 1.0, "b": 1.0}
    assert relative_speeds({"a": SpeedReports(), "b": SpeedReports()}) == {"a": 1.0, "b": 1.0}


@given(st.lists(st.floats(0.67, 1.0), min_size=1, max_size=8))
def test_equal_machines_are_one_kind_and_keep_their_measured_speeds(noise: list[float]) -> None:
    state = state_of({f"r{n}": speed for n, speed in enumerate(noise)})
    found = rollout_speeds(state)
    assert {worker.kind for worker in found} == {0}
    assert [one.speed for one in found] == [r.speed for _, r in sorted(state.rollouts.items())]


def test_unlike_machines_are_found_from_statuses() -> None:
    state = state_of({"a": 1.0, "b": 0.1, "c": 0.3})
    assert [(one.rollout, one.kind) for one in rollout_speeds(state)] == [
        ("a", 2), ("b", 0), ("c", 1),
    ]  # fmt: skip
    assert {one.kind for one in rollout_speeds(state, by_speed=False)} == {0}
    assert {one.speed for one in rollout_speeds(state, by_speed=False)} == {1.0}


def test_preemptible_rollouts_stay_the_lowest_kind() -> None:
    state = state_of({"a": 1.0, "b": 0.1, "spot": 1.0})
    spot = replace_status(state, "spot", preemptible=True)
    assert {one.rollout: one.kind for one in rollout_speeds(spot)} == {"a": 2, "b": 1, "spot": 0}


def test_no_sample_waits_for_a_fast_rollout_that_takes_no_work() -> None:
    state = state_of({"a": 1.0, "b": 0.1, "c": 0.3})
    leaving = replace_status(state, "a", health="leaving")
    assert {one.rollout: one.kind for one in rollout_speeds(leaving)} == {"a": 0, "b": 1, "c": 2}


def test_speeds_stay_tokens_per_second() -> None:
    """What a load of an old version costs is counted in them."""
    state = state_of({"a": 1.0, "b": 0.1, "c": 0.3})
    found = {one.rollout: one.speed for one in rollout_speeds(state)}
    measured = {name: rollout.speed for name, rollout in state.rollouts.items()}
    assert all(0.5 < found[name] / measured[name] < 2 for name in found)


def replace_status(state: DispatchState, name: str, **changed: object) -> DispatchState:
    state.apply_status(status(name, 16, 16 / 26, **changed), 9.0)
    return state


# ---- placement -------------------------------------------------------------------------------


@given(
    means=st.lists(st.floats(1, 5000), min_size=2, max_size=40),
    kinds=st.lists(st.integers(0, 2), min_size=2, max_size=8),
    ascending=st.booleans(),
)
def test_every_rollout_has_one_place_and_slow_ones_the_short_answers(
    means: list[float], kinds: list[int], ascending: bool
) -> None:
    workers = [RolloutSpeed(f"r{n}", 4.0**kind, kind=kind, slots=8) for n, kind in enumerate(kinds)]
    layout = lay_out_wave(means, workers, ascending, samples=4, slots=8)
    if layout is None or len(set(kinds)) == 1:
        return
    assert sorted(name for group in layout.groups for name in group) == sorted(
        worker.rollout for worker in workers
    )
    assert list(layout.kinds) == sorted(layout.kinds)
    assert list(layout.ends) == sorted(layout.ends)
    assert layout.ends[-1] == len(means)
    kind_of = {worker.rollout: worker.kind for worker in workers}
    best = [kind_of[next(layout.near(mean))[0]] for mean in sorted(means)]
    assert best == sorted(best)


def test_a_kind_gets_the_share_of_tokens_that_it_generates() -> None:
    layout = lay_out_wave(MEANS, UNLIKE, True, 4, 4)
    assert layout is not None
    ends = dict(zip(layout.kinds, layout.ends, strict=True))
    tokens = sum(MEANS)
    assert abs(sum(MEANS[: ends[0]]) / tokens - 0.2 / 1.6) < 0.05
    assert abs(sum(MEANS[ends[0] : ends[1]]) / tokens - 0.4 / 1.6) < 0.08


def test_both_waves_give_the_long_answers_to_the_fast_rollout() -> None:
    for ascending in (True, False):
        layout = lay_out_wave(MEANS, UNLIKE, ascending, 4, 4)
        assert layout is not None
        assert next(layout.near(2000)) == ("fast",)
        assert next(layout.near(100)) == ("slow",)


def test_without_ranking_only_the_kinds_are_divided() -> None:
    alike = [RolloutSpeed(f"r{n}") for n in range(6)]
    assert lay_out_wave(MEANS, alike, True, 4, 4, is_ranked=False) is None
    fast = [RolloutSpeed(f"f{n}", 1.0, kind=1, slots=4) for n in range(5)]
    layout = lay_out_wave(MEANS, [*fast, UNLIKE[0]], True, 4, 4, is_ranked=False)
    assert layout is not None
    assert [len(group) for group in layout.groups] == [1, 5]


def held_layout(held_max: int) -> WaveLayout:
    return WaveLayout((100.0, 2000.0), (("slow",), ("fast",)), (1, 2), (0, 1), held_max)


def test_a_long_sample_waits_for_the_fast_rollout_and_a_short_one_runs() -> None:
    rooms = [RolloutRoom("slow", 4, kind=0), RolloutRoom("fast", 1, kind=1)]
    layout = held_layout(held_max=8)
    works = [
        PlacementWork(("0.0", "0.1", "0.2"), 2000, layout=layout),
        PlacementWork(("1.0", "1.1"), 100, layout=layout),
    ]
    assert place_samples(works, rooms) == {"0.0": "fast", "1.0": "slow", "1.1": "slow"}


def test_a_short_sample_runs_on_the_fast_rollout_where_the_slow_one_is_full() -> None:
    work = PlacementWork(("1.0",), 100, layout=held_layout(8))
    assert place_samples([work], [RolloutRoom("fast", 2, kind=1)]) == {"1.0": "fast"}


def test_of_too_many_waiting_samples_the_shortest_run_on_slow_rollouts() -> None:
    layout = WaveLayout((100.0, 1500.0, 2000.0), (("slow",), ("fast",)), (1, 3), (0, 1), 2)
    works = [
        PlacementWork(("0.0", "0.1"), 2000, layout=layout),
        PlacementWork(("1.0", "1.1"), 1500, layout=layout),
    ]
    plan = place_samples(works, [RolloutRoom("slow", 8, kind=0)])
    assert plan == {"1.0": "slow", "1.1": "slow"}


def test_what_resumes_takes_the_fastest_kind() -> None:
    rooms = [RolloutRoom("slow", 8, 0.0, 0.1, kind=0), RolloutRoom("fast", 8, 9e9, 1.0, kind=1)]
    assert place_samples([PlacementWork(("0.0",))], rooms) == {"0.0": "slow"}
    assert place_samples([PlacementWork(("0.0",), is_urgent=True)], rooms) == {"0.0": "fast"}


def test_as_many_more_are_admitted_as_may_wait() -> None:
    assert room_to_admit(free=10, unassigned=4, held_max=0) == 6
    assert room_to_admit(free=10, unassigned=4, held_max=8) == 14
    assert room_to_admit(free=0, unassigned=4, held_max=8) < 0


def test_layouts_follow_the_kinds_under_every_update_policy() -> None:
    """Under in-flight policies equal machines are not laid out, unlike ones are by kind."""
    lengths = LengthHistory()
    unlike, alike = state_of({"a": 1.0, "b": 0.1}), state_of({"a": 1.0, "b": 0.9})
    waves = WaveLayouts(is_ranked=False, groups_per_wave=2)
    assert waves.of([0], alike, lengths, []) == {}
    assert waves.of([0], unlike, lengths, []) == {}, "no length is known"
    assert waves.held_max == 0


# ---- moves -----------------------------------------------------------------------------------


def load(name: str, kv: int, kind: int, **changed: object) -> RolloutLoad:
    made = RolloutLoad(name, V3, 2, 0, kv, kv + 1, 100, 16, kind=kind)
    return replace(made, **changed)  # type: ignore[arg-type]


def test_the_slow_rollout_gives_its_tail_to_the_fast_one_though_it_has_more() -> None:
    plan = plan_repack([load("fast", 30, 1), load("slow", 50, 0)])
    assert plan == (RepackMove("slow", "fast", 2, 50),)
    assert plan_repack([load("a", 30, 0), load("b", 50, 0)]) == (RepackMove("a", "b", 2, 30),)


def test_a_slow_rollout_that_gains_nothing_takes_no_tail_of_a_fast_one() -> None:
    assert plan_repack([load("slow", 50, 0, gains=False), load("fast", 30, 1)]) == ()


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 2), st.booleans()), min_size=2, max_size=12
    )
)
def test_no_tail_moves_to_a_slower_kind(many: list[tuple[int, int, bool]]) -> None:
    loads = [load(f"r{n}", kv, kind, gains=gains) for n, (kv, kind, gains) in enumerate(many)]
    kinds = {one.rollout: one.kind for one in loads}
    plan = plan_repack(loads)
    assert all(kinds[move.source] <= kinds[move.destination] for move in plan)
    assert max(Counter(move.source for move in plan).values(), default=1) == 1


def test_outliers_gather_on_the_fast_rollout() -> None:
    def running(name: str, rollout: str) -> RunningRequest:
        expected = ExpectedLength(100.0, 10.0, 8)
        return RunningRequest(name, rollout, V3, 900, 20, expected, unfinished=0.01)

    requests = [running("0.0", "slow"), running("0.1", "slow"), running("1.0", "fast")]
    loads = [load("fast", 30, 1), load("slow", 50, 0)]
    assert plan_outliers(requests, loads)[0] == {"0.0": "fast", "0.1": "fast"}
