"""The search over known worlds: the slower side gets more GPUs, and no proposal is a step back."""

import random
from dataclasses import replace

import pytest

from rollstream.plan.tuning.choices import TuningChoice, choice_of, choice_space
from rollstream.plan.tuning.search import TuningProposal, propose
from rollstream.simulator.experiment import Prediction
from tests.tuning.worlds import configured, two_sided

PRESENT = configured(rollouts={"count": 4})  # and one unit for its trainer


def proposed(evaluate, gpus: int = 8, present: TuningChoice | None = None) -> TuningProposal:
    space = choice_space(PRESENT, gpus)
    found = propose(space, present or choice_of(PRESENT), gpus >= 5, evaluate)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("generate", "train", "split"),
    [(100.0, 100.0, (4, 4)), (300.0, 100.0, (2, 6)), (100.0, 300.0, (6, 2)), (9.0, 900.0, (7, 1))],
)
def test_the_slower_side_gets_more_gpus(generate: float, train: float, split: tuple[int, int]):
    best = proposed(two_sided(generate, train)).best
    assert (best.choice.rollouts, best.choice.trainer_gpus) == split


def test_the_best_of_many_splits_is_found_without_trying_all():
    tried: list[TuningChoice] = []
    world = two_sided(10.0, 30.0)

    def evaluate(choice: TuningChoice) -> Prediction:
        tried.append(choice)
        return world(choice)

    best = proposed(evaluate, gpus=400).best
    assert (best.choice.rollouts, best.choice.trainer_gpus) == (300, 100)
    assert len({choice.rollouts for choice in tried}) < 60
    assert len(tried) == len(set(tried))  # each choice is simulated once


@pytest.mark.parametrize("seed", range(40))
def test_a_proposal_is_never_predicted_slower_than_the_present_settings(seed: int):
    """Speeds without any order; lag has a price, which must not cost speed against the present."""

    def arbitrary(choice: TuningChoice) -> Prediction | None:
        drawn = random.Random(f"{seed} {choice}").randrange(1000)
        return None if drawn < 50 else Prediction(float(drawn), 0.5, 0.0, lag_mean=choice.waves)

    present = choice_of(PRESENT)
    found = proposed(arbitrary)
    now = arbitrary(present)
    assert found.best.predicted.tokens_per_s >= (now.tokens_per_s if now else 0.0)
    again = proposed(arbitrary)
    assert again == found


def test_what_gains_nothing_is_left_as_it_is():
    def flat(choice: TuningChoice) -> Prediction:
        return Prediction(100.0, 0.5, 0.0, lag_mean=1.0)

    found = proposed(flat)
    assert found.best.choice == choice_of(PRESENT)
    assert found.gain == 0.0


def test_of_equal_speeds_the_one_with_less_lag_is_worth_more():
    def by_lag(choice: TuningChoice) -> Prediction:
        return Prediction(100.0, 0.5, 0.0, lag_mean=4.0 * choice.waves)

    assert proposed(by_lag).best.choice.waves == 1


def test_the_present_settings_on_more_gpus_are_compared_but_not_proposed():
    found = proposed(two_sided(100.0, 1000.0), gpus=3)
    assert not found.present_fits
    assert found.present is not None
    assert found.best.choice.rollouts == 2
    assert found.gain == pytest.approx(-0.5)


def test_no_more_lag_is_proposed_than_is_permitted():
    """Lag makes this world faster, and the present bound is above the permitted one."""

    def by_lag(choice: TuningChoice) -> Prediction:
        return Prediction(100.0 * choice.waves, 0.5, 0.0, lag_mean=0.0)

    found = propose(choice_space(PRESENT, 8, lag_max=1), choice_of(PRESENT), True, by_lag)
    assert found is not None
    assert not found.present_fits
    assert found.best.choice.max_lag == 1


def test_a_world_in_which_nothing_runs_has_no_proposal():
    space = choice_space(PRESENT, 8)
    assert propose(space, choice_of(PRESENT), True, lambda choice: None) is None


def test_the_best_of_each_policy_is_shown():
    rows = proposed(two_sided(100.0, 100.0, policy=0.5)).rows(5)
    assert {one.choice.on_update for one in rows} == {
        "in_flight",
        "in_flight_recompute",
        "keep_version",
    }
    assert len(rows) == 5
    assert rows[0].worth >= max(one.worth for one in rows) * 0.99


def test_a_held_part_stays():
    hold = frozenset({"split", "slots", "on_update"})
    space = choice_space(PRESENT, 8, hold=hold)
    found = propose(space, choice_of(PRESENT), True, two_sided(100.0, 100.0))
    assert found is not None
    tried = [found.best, *found.others]
    assert {replace(o.choice, max_lag=2, waves=3) for o in tried} == {choice_of(PRESENT)}
