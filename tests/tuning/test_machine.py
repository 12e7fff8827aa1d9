"""The simulated machine: what it takes from where, and what it refuses."""

from dataclasses import replace

import pytest

from rollstream.errors import ConfigurationError
from rollstream.plan.tuning.choices import choice_of, choice_space
from rollstream.plan.tuning.machine import machine_of
from rollstream.plan.tuning.measured import DecodePoint, RunMeasurements
from rollstream.plan.tuning.search import propose
from rollstream.producers.engines.roofline import Roofline
from rollstream.run.config.settings import Configuration
from tests.tuning.worlds import configured

STEADY = Roofline(0.01, 0.0, 0.0)
TORCH = Configuration.model_validate({"trainer": {"workers": 1}, "rollouts": {"slots": 8}})
EMPTY = RunMeasurements()
SHOWN = replace(
    EMPTY,
    groups=((10, 20), (30, 40)),
    prompt_tokens=5,
    trained_token_s=1e-3,
    step_tokens=100.0,
    publish_s=0.1,
    arrive_s=0.2,
    update_s=0.3,
)


@pytest.mark.parametrize(
    ("profile", "run", "message"),
    [
        (STEADY, None, "no answer lengths are known: no RUN; give a recorded run"),
        (STEADY, EMPTY, "RUN has no finished answer"),
        (None, SHOWN, "make a profile .`rollstream profile CONFIG`., or give a recorded run"),
        (STEADY, replace(SHOWN, trained_token_s=None), "a short one is enough"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    profile: Roofline | None, run: RunMeasurements | None, message: str
):
    with pytest.raises(ConfigurationError, match=message):
        machine_of(TORCH, profile, run, None)


def test_a_paced_configuration_needs_neither_profile_nor_run():
    machine = machine_of(configured(), None, None, None)
    assert machine.train_token_s == 1e-4
    assert machine.workload.prompts == 8
    assert any("no log shows it" in text for text in machine.assumed)


def test_times_of_a_run_are_taken_over():
    machine = machine_of(TORCH, STEADY, SHOWN, TORCH)
    assert (machine.update_s, machine.publish_s, machine.arrive_s) == (0.3, 0.1, 0.2)
    assert machine.workload.group(1)[:2] == [30, 40]
    assert any("what drafts give" in text for text in machine.unknown)
    assert any("share the cores" in text for text in machine.unknown)


def test_the_trainer_of_a_run_with_other_threads_is_scaled():
    wide = Configuration.model_validate({"trainer": {"workers": 4}})
    machine = machine_of(TORCH, STEADY, SHOWN, wide)
    cluster = machine.cluster(choice_of(TORCH))
    assert cluster.train_token_s == pytest.approx(4e-3)
    assert machine.cluster(replace(choice_of(TORCH), trainer_gpus=4)).train_token_s == 1e-3


def test_answers_of_a_run_set_the_level_of_a_profile():
    points = tuple(DecodePoint(4.0, 100.0, 0.015) for _ in range(40))
    machine = machine_of(TORCH, STEADY, replace(SHOWN, points=points), TORCH)
    assert machine.engine.step_s(1, 0) == pytest.approx(0.015)


def test_without_a_profile_repack_takes_all_slots_for_a_cheap_batch():
    """As a rollout without a profile states it in its heartbeats."""
    rows_cost = Roofline(0.01, 0.0, 0.001)
    points = tuple(DecodePoint(rows, 0.0, rows_cost.step_s(int(rows), 0)) for rows in range(1, 41))
    run, choice = replace(SHOWN, points=points), replace(choice_of(TORCH), slots=64)
    assert machine_of(TORCH, None, run, TORCH).cluster(choice).batch_max == 64
    assert machine_of(TORCH, rows_cost, run, TORCH).cluster(choice).batch_max < 64


def test_what_a_paced_trainer_takes_beyond_its_settings_is_not_divided():
    """100 tokens of 0.1 ms and 50 ms a step are stated, 0.4 ms more per token was measured."""
    c, run = configured(), replace(SHOWN, trained_token_s=1e-4 + 5e-4 + 4e-4)
    four = replace(choice_of(c), trainer_gpus=4)
    assert machine_of(c, None, run, c).cluster(four).train_token_s == pytest.approx(4.25e-4)
    assert machine_of(c, None, run, None).train_serial_s == 0.0
    assert machine_of(c, None, replace(run, trained_token_s=1e-5), c).train_serial_s == 0.0


@pytest.mark.parametrize("on_update", ["keep_version", "in_flight"])
@pytest.mark.parametrize("train_token_s", [1e-6, 4e-4])
def test_the_slower_side_of_a_simulated_world_gets_more(on_update: str, train_token_s: float):
    """Eight GPUs: a trainer that hardly computes keeps one, one that is slow gets several."""
    c = configured(
        rollouts={"count": 4, "on_update": on_update},
        dispatch={"max_lag": 4},
        trainer={"groups_per_step": 48},
        paced={"train_token_s": train_token_s},
    )
    machine = machine_of(c, None, None, None)
    hold = frozenset({"slots", "max_lag", "on_update", "repack"})
    found = propose(
        choice_space(c, 8, hold=hold), choice_of(c), True, lambda one: machine.predicted(one, 3)
    )
    assert found is not None
    assert found.gain is not None
    assert found.gain > 0.1
    choice = found.best.choice
    assert (choice.trainer_gpus == 1) == (train_token_s < 1e-5)
    assert choice.rollouts + choice.trainer_gpus == 8


def test_an_answer_that_no_cache_holds_has_no_prediction():
    c = configured(paced={"kv_tokens": 256, "lengths": {"median": 50.0, "p99": 150.0}})
    machine = machine_of(c, None, None, None)
    assert machine.predicted(choice_of(c), 2) is not None
    assert replace(machine, kv_capacity=100).predicted(choice_of(c), 2) is None


def test_without_a_bound_lag_is_not_limited():
    c = configured(dispatch={"max_lag": None, "ready_groups_max": 40})
    machine, unbounded = machine_of(c, None, None, None), choice_of(c)
    found = machine.predicted(unbounded, 6)
    bounded = machine.predicted(replace(unbounded, max_lag=1, waves=2), 6)
    assert found is not None
    assert bounded is not None
    assert bounded.lag_max <= 1
    assert found.lag_max >= bounded.lag_max
