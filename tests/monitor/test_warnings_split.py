"""Warnings about the split between rollouts and trainer, each from a planted state."""

from dataclasses import replace

import pytest

from rollstream.look.monitor.concerns import warnings_of
from rollstream.look.monitor.machine_use import MachineUse
from rollstream.look.monitor.snapshot import RunSnapshot
from rollstream.look.monitor.state import RunState
from rollstream.look.monitor.warnings_split import (
    PipelineBalance,
    balance_of,
    best_split,
    more_rollouts,
    rollouts_needed,
)
from tests.support import planted_states as planted
from tests.support.planted_states import NOW_S, STEP_S, STEPS, healthy, moment

EVEN = PipelineBalance(
    rollouts=4, rollout_gpus=1, trainer_gpus=4, rollouts_idle=0.0, trainer_idle=0.0
)


def waiting(share: float, rollouts: int = 4) -> RunState:
    """A run whose trainer waits this share of a step, beside busy rollouts."""
    state = healthy(rollouts)
    for step in range(STEPS - 10, STEPS + 1):
        state.apply(planted.done(step, wait_s=share * STEP_S))
    return state


def idle_beside(state: RunState, share: float) -> RunState:
    """Another heartbeat of each rollout, half a second later."""
    for name in list(state.rollouts):
        before = state.rollouts[name][-1]
        state.apply(planted.status(name, NOW_S, idle_s=before.idle_s + share * 1.19))
    return state


def on_gpus(at: RunSnapshot, trainer: int, each: int = 1) -> RunSnapshot:
    return replace(at, plan=replace(at.plan, trainer_gpus=trainer, rollout_gpus=each))


def beside(at: RunSnapshot, cores: float, busy: float) -> RunSnapshot:
    """The same moment on one machine with these cores."""
    return replace(at, machine=MachineUse(cores, busy))


def test_a_trainer_that_waits_is_told_how_much_more_rollouts_would_give():
    (concern,) = warnings_of(beside(moment(waiting(0.75, rollouts=5)), 16, 8))
    assert concern.kind == "trainer_starved"
    assert "waits 75% of a step" in concern.what
    assert "3 more rollouts would give about +60% tokens/s" in concern.what


def test_cores_that_are_busy_get_no_more_rollouts():
    (concern,) = warnings_of(beside(moment(waiting(0.75, rollouts=2)), 2, 1.9))
    assert "more rollout" not in concern.what
    assert "1.9 of 2 cores are busy" in concern.what
    assert "another machine" in concern.do


def test_a_machine_with_room_for_one_is_promised_what_one_gives():
    (concern,) = warnings_of(beside(moment(waiting(0.75, rollouts=5)), 16, 14.8))
    assert "1 more rollout would give about +20% tokens/s" in concern.what


def test_no_number_is_promised_for_machines_that_are_unknown():
    (concern,) = warnings_of(moment(waiting(0.75, rollouts=5)))
    assert "more rollout" not in concern.what
    assert "where cores are idle" in concern.do


def test_more_rollouts_are_proposed_only_up_to_what_the_trainer_can_take():
    waits = replace(EVEN, rollouts=10, trainer_idle=0.2)
    assert more_rollouts(waits) == (3, pytest.approx(0.25))
    assert more_rollouts(replace(waits, trainer_idle=0.1)) is None


def test_rollouts_that_are_idle_too_are_not_to_be_added():
    assert more_rollouts(replace(EVEN, rollouts_idle=0.6, trainer_idle=0.6)) is None


def test_gpus_go_to_the_side_that_the_other_waits_for():
    assert best_split(replace(EVEN, trainer_idle=0.5)) == (5, 3, pytest.approx(0.25))
    assert best_split(replace(EVEN, rollouts_idle=0.5)) == (3, 5, pytest.approx(0.25))


def test_rollouts_of_several_gpus_are_counted_as_such():
    """Of 12 GPUs rollouts take two each: one rollout less frees two for the trainer."""
    wide = PipelineBalance(5, 2, 2, rollouts_idle=0.6, trainer_idle=0.0)
    assert best_split(wide) == (4, 4, pytest.approx(1.0))
    assert best_split(replace(wide, trainer_gpus=None)) is None


def test_a_bad_split_of_gpus_is_a_warning_with_its_settings():
    (concern,) = warnings_of(on_gpus(moment(waiting(0.75)), trainer=4))
    assert concern.kind == "split_off"
    assert "the trainer waits 75% of a step: 6 rollouts and 2 GPUs" in concern.what
    assert "+50% tokens/s" in concern.what
    assert "rollouts.count = 6 and trainer.processes = 2" in concern.do
    assert "--gpus 8" in concern.do


def test_idle_rollouts_beside_a_busy_trainer():
    state = idle_beside(waiting(0.0), 0.5)
    kinds = [one.kind for one in warnings_of(on_gpus(moment(state), trainer=4))]
    assert "split_off" in kinds
    assert "split_off" not in [one.kind for one in warnings_of(moment(state))]


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_balanced_run_has_no_warning(share: float):
    at = moment(waiting(share))
    assert warnings_of(at) == ()
    assert warnings_of(on_gpus(at, trainer=4)) == ()


def test_waiting_beside_arithmetic_is_not_idleness():
    """The trainer waits for trajectories while its threads compute earlier ones."""
    state = waiting(0.75)
    for step in range(STEPS - 10, STEPS + 1):
        state.apply(planted.done(step, wait_s=0.75 * STEP_S, busy_s=1.8 * STEP_S))
    at = moment(state)
    balance = balance_of(replace(at, plan=replace(at.plan, trainer_threads=2)))
    assert balance is not None
    assert balance.trainer_idle == pytest.approx(0.1)


def test_a_finished_run_is_told_too():
    state = waiting(0.75)
    state.apply_event({"time_s": NOW_S, "event": "complete"})
    at = moment(state, NOW_S + 3600)
    (concern,) = warnings_of(replace(at, plan=replace(at.plan, rollout_cores=None)))
    assert "2 more rollouts would give about +50% tokens/s" in concern.what


def test_the_idleness_of_a_finished_run_is_that_of_its_whole_time():
    """At its end its rollouts wait for the last step; before, they were busy."""
    state = waiting(0.0)
    for name in list(state.rollouts):
        state.apply(planted.status(name, NOW_S, idle_s=10.0, busy_s=90.0))
    state.apply_event({"time_s": NOW_S, "event": "complete"})
    balance = balance_of(moment(state, NOW_S + 1))
    assert balance is not None
    assert balance.rollouts_idle == pytest.approx(0.1)


def test_the_first_steps_are_not_judged():
    state = planted.plan().state()
    for step in range(1, 4):
        planted.apply_step(state, step)
    state.apply(planted.status("rollout-0"))
    assert balance_of(moment(state)) is None


def test_rollouts_that_would_do():
    assert rollouts_needed(replace(EVEN, rollouts_idle=0.6)) == 2
    assert rollouts_needed(EVEN) == 4
