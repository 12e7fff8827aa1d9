"""Rollouts and trainer on the same cores: more threads than cores compute no more."""

from dataclasses import replace

import pytest

from rollstream.plan.tuning.choices import choice_of
from rollstream.plan.tuning.cores import on_shared_cores
from rollstream.plan.tuning.machine import machine_of
from rollstream.plan.tuning.measured import DecodePoint, RunMeasurements
from rollstream.producers.engines.roofline import Roofline
from rollstream.run.config.settings import Configuration
from rollstream.simulator.experiment import Prediction

TORCH = Configuration.model_validate(
    {
        "trainer": {"workers": 2, "groups_per_step": 8, "samples_per_group": 2},
        "rollouts": {"count": 2, "slots": 8},
    }
)
SHOWN = RunMeasurements(
    groups=tuple((20 + 5 * (n % 7), 30 + 3 * (n % 11)) for n in range(64)),
    prompt_tokens=5,
    trained_token_s=2e-3,
    train_cpu_token_s=2e-3,
    decode_cpu_token_s=5e-4,
    points=tuple(DecodePoint(10.0, 250.0, 0.03) for _ in range(40)),
    step_tokens=500.0,
    publish_s=0.0,
    arrive_s=0.0,
    update_s=0.0,
)
ENGINE = Roofline(0.01, 0.0, 0.0)


def test_threads_beyond_the_cores_are_slowed_until_they_fit():
    """Three threads that never wait, on two cores: each is half as slow again."""
    seen: list[float] = []

    def simulate(slower: float) -> Prediction:
        seen.append(slower)
        return Prediction(300 / slower, 0.5, idle_share=0.0, trainer_idle_share=0.0)

    found = on_shared_cores(simulate, 2, 1, 2.0)
    assert found is not None
    assert found.tokens_per_s == pytest.approx(200)
    assert seen == [1.0, 1.5]


def test_threads_that_fit_the_cores_are_simulated_once():
    waits = Prediction(300, 0.5, idle_share=0.5, trainer_idle_share=0.1)
    assert on_shared_cores(lambda slower: waits, 2, 1, 2.0) is waits


def test_what_cannot_run_alone_cannot_run_on_shared_cores():
    assert on_shared_cores(lambda slower: None, 2, 1, 2.0) is None


def test_more_threads_on_the_same_cores_train_hardly_more():
    """Eight threads on two cores: each unit as a core of its own would be several times as fast."""
    shared = machine_of(TORCH, ENGINE, SHOWN, TORCH, cores=2)
    now = choice_of(TORCH)
    many = replace(now, rollouts=4, trainer_gpus=4)
    one, other = shared.predicted(now, 3), shared.predicted(many, 3)
    assert one is not None
    assert other is not None
    assert other.tokens_per_s < 1.15 * one.tokens_per_s
    alone = replace(shared, cores=None)
    apart, wide = alone.predicted(now, 3), alone.predicted(many, 3)
    assert apart is not None
    assert wide is not None
    assert wide.tokens_per_s > 1.7 * apart.tokens_per_s


def test_step_times_of_a_run_on_shared_cores_are_those_of_its_processor_time():
    machine = machine_of(TORCH, ENGINE, SHOWN, TORCH, cores=2)
    assert machine.engine.step_s(8, 0) / 8 == pytest.approx(5e-4)
    assert any("slowed by one factor" in text for text in machine.unknown)


def test_the_recorded_speed_takes_off_what_other_work_needs_of_the_cores():
    """A run with .7 of the speed that two cores give: 1.4 cores are left for it."""
    free = machine_of(TORCH, ENGINE, SHOWN, TORCH, cores=2)
    found = free.predicted(choice_of(TORCH), choice_of(TORCH).waves + 1)
    assert found is not None
    run = replace(SHOWN, steady_tokens_per_s=found.tokens_per_s * 0.7)
    machine = machine_of(TORCH, ENGINE, run, TORCH, cores=2)
    assert machine.cores == pytest.approx(1.4, rel=0.05)
    assert machine.checked == pytest.approx(1.0, abs=0.1)


def test_the_prediction_of_a_recorded_run_is_held_against_it():
    c = Configuration.model_validate({**TORCH.model_dump(), "rollouts": {"engine": "paced"}})
    run = replace(SHOWN, steady_tokens_per_s=100.0)
    machine = machine_of(c, None, run, c, cores=2)
    assert machine.cores is None
    assert machine.checked is not None
