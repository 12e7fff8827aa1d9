"""Every policy where its result can be computed by hand: answers of 100 tokens last 1 s, a step
trains for 0.5 s, a rollout takes weights for 0.25 s, two rollouts hold one wave together.
"""

import pytest

from rollstream.producers.engines.roofline import Roofline
from tests.simulator.small import run


def test_synchronous_steps_generate_then_train_then_switch():
    result = run("synchronous")
    assert result.step_s == pytest.approx(1.0 + 0.5 + 0.25)
    assert result.lags == {0: 1.0}


@pytest.mark.parametrize("policy", ["one_step", "stream", "rhymerl"])
def test_one_step_policies_hide_training_and_take_weights_between_waves(policy: str):
    result = run(policy)
    assert result.step_s == pytest.approx(1.0 + 0.25)
    assert result.lags == {1: 1.0}


@pytest.mark.parametrize("policy", ["partial_rollout", "in_flight"])
def test_interruption_costs_each_rollout_the_transfer_once_a_step(policy: str):
    assert run(policy).step_s == pytest.approx(1.0 + 0.25)


def test_recomputing_the_cache_costs_its_prefill():
    """A prompt of 10 tokens is prefilled in 7 ms for both of its answers; the version comes 0.5 s
    after a wave was complete, after 50 decode steps: 10 + 2 × 50 tokens are prefilled again.
    """
    roofline = Roofline(weights_s=0.01, kv_token_s=0.0, row_s=0.0, prefill_token_s=0.0007)
    kept = run("in_flight", roofline=roofline).step_s
    assert kept == pytest.approx(1.0 + 0.007 + 0.25)
    again = run("partial_rollout", roofline=roofline).step_s
    assert again == pytest.approx(kept + (10 + 2 * 50) * 0.0007)


@pytest.mark.parametrize("policy", ["laminar", "ours"])
def test_with_relays_the_trainer_never_waits_for_rollouts_to_take_weights(policy: str):
    result = run(policy)
    assert result.step_s == pytest.approx(1.0 + 0.25)
    assert result.counts.moves == 0, "equal answers have no tail"


def test_a_slow_trainer_bounds_every_disaggregated_policy():
    for policy in ("one_step", "stream", "partial_rollout", "in_flight", "laminar", "ours"):
        result = run(policy, train_fixed_s=4.0, update_s=0.0)
        assert result.step_s == pytest.approx(4.0), policy
        assert result.trainer_idle_share == pytest.approx(0.0, abs=1e-9), policy


def test_utilisation_and_idle_share_are_those_of_the_hand_computed_cycle():
    """Of 1.75 s a rollout decodes 1 s; with their prompt its two answers grow from 10 to 210 cached
    tokens. Time in which the same accelerators train is not idle.
    """
    result = run("synchronous", kv_capacity=1_000)
    assert result.kv_utilisation == pytest.approx(1.0 * (10 + 210) / 2 / 1.75 / 1_000)
    assert result.idle_share == pytest.approx(1 - 1.0 / 1.25)
