"""Every published objective equals its paper: loss and gradient with respect to the
log-probabilities, against float64 loops written from the papers.
"""

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from rollstream.consumers.objective_settings import OBJECTIVE_PRESETS
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.advantages import advantages
from rollstream.consumers.trainer.data.prepare import prepare_group
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.streams.values import Span, Version
from testbed.objectives.critic_reference import FORMS as CRITICS
from testbed.objectives.critic_updates import (
    critic_quotients,
    critic_settings,
    drawn_critic_update,
    reference_critic_loss,
    trainer_critic_loss,
)
from testbed.objectives.further_policies import OBJECTIVES, OTHER_OBJECTIVES, WEIGHT_MAX
from testbed.objectives.reference import (
    CISPO_MAX,
    GUARD,
    Answer,
    against_others,
    centred,
    dapo,
    dapo_by_prompt,
    dppo_mask,
    loss_and_gradient,
    over_batch,
    overlong_reward,
    quotients,
    standardised,
    token_count,
)
from testbed.objectives.updates import (
    Update,
    compared,
    difference,
    drawn_update,
    preset_settings,
    samples_of,
    trainer_loss,
)
from tests.trainer.data.test_intake_of_foreign_records import RECORD

ALL = {**OBJECTIVES, **OTHER_OBJECTIVES}
GROUP = [Answer(reward, (-1.0,)) for reward in (1.0, 0.25, -0.5, 0.0, 1.0)]
REWARDS = [answer.reward for answer in GROUP]


@pytest.fixture(scope="module")
def update() -> Update:
    return drawn_update()


def test_every_preset_has_a_reference():
    assert {*OBJECTIVES, "ppo"} == set(OBJECTIVE_PRESETS)
    assert "ppo" in CRITICS


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("name", ALL)
def test_loss_and_gradient_equal_the_paper(update: Update, name: str, parts: int):
    """In one micro-batch, and in five whose sums are divided once."""
    found = difference(ALL[name], update, preset_settings(name), parts)
    assert found.loss < 1e-6
    assert found.gradient < 1e-6


@pytest.mark.parametrize("name", ALL)
def test_gradients_of_the_references_equal_difference_quotients(name: str):
    small = drawn_update(prompts=2, answers=4)
    _, gradient = loss_and_gradient(ALL[name], small.groups, small.policy)
    found = quotients(ALL[name], small.groups, small.policy)
    assert float((found - gradient).abs().max() / gradient.abs().max()) < 1e-6


def tokens(update: Update) -> Iterator[tuple[float, float, float]]:
    """Advantage, log π and log μ of each token."""
    for group, policy in zip(update.groups, update.policy, strict=True):
        for answer, new, a in zip(group, policy, centred(group), strict=True):
            for logprob, old in zip(new.tolist(), answer.old, strict=True):
                yield a, logprob, old


def sides(pairs: list[tuple[float, float]], low: float, high: float) -> set[tuple[bool, int]]:
    """Of (advantage, ratio): sign of the advantage, and below, within or above the bounds."""
    return {(a > 0, (ratio > high) - (ratio < low)) for a, ratio in pairs}


def test_every_part_acts(update: Update):
    """Advantages of both signs have ratios on both sides of every bound."""
    everywhere = {(positive, side) for positive in (True, False) for side in (-1, 0, 1)}
    own = [(a, math.exp(new - old)) for a, new, old in tokens(update)]
    whole: list[tuple[float, float, int]] = []
    for group, policy in zip(update.groups, update.policy, strict=True):
        for answer, new, a in zip(group, policy, centred(group), strict=True):
            moved = float(new.double().sum()) - sum(answer.old)
            whole.append((a, moved, len(answer.old)))
    means = [(a, math.exp(moved / count)) for a, moved, count in whole]
    products = [(a, math.exp(moved)) for a, moved, _ in whole]
    assert sides(own, 0.8, 1.2) == sides(own, 0.8, 1.28) == everywhere
    assert sides(means, 1 - 3e-4, 1 + 4e-4) == everywhere
    for pairs, bound in ((own, CISPO_MAX), (own, 4.0), (own, 2.0), (products, 1.0)):
        assert {(a > 0, ratio > bound) for a, ratio in pairs} == {
            (positive, above) for positive in (True, False) for above in (True, False)
        }
    assert any(a < 0 and ratio > 1.5 for a, ratio in own), "the dual clip acts"


def test_the_parts_of_decoupled_ppo_act(update: Update):
    """Ratios to the proximal policy lie on both sides of the clip, its weights of their bound."""
    moved: list[tuple[float, float]] = []
    weights: list[float] = []
    for group, policy in zip(update.groups, update.policy, strict=True):
        for answer, new, a in zip(group, policy, centred(group), strict=True):
            for logprob, old, proximal in zip(
                new.tolist(), answer.old, answer.proximal, strict=True
            ):
                moved.append((a, math.exp(logprob - proximal)))
                weights.append(math.exp(proximal - old))
    assert len(sides(moved, 0.8, 1.2)) == 6
    assert min(weights) < 0.5 < WEIGHT_MAX < 6.0 < max(weights)


def test_the_mask_of_dppo_acts_on_both_sides(update: Update):
    """Tokens beyond the bound are masked where they would move on, and kept where they return."""
    found = {
        (a > 0, dppo_mask(new, old, a))
        for a, new, old in tokens(update)
        if abs(math.exp(new) - math.exp(old)) > 0.2
    }
    assert len(found) == 4


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("grpo", {"clip_low": 0.25}),
        ("grpo", {"clip_high": 0.28}),
        ("grpo", {"aggregate": "token"}),
        ("dr_grpo", {"aggregate_tokens": 17}),
        ("dr_grpo", {"advantage": "leave_one_out"}),
        ("dapo", {"clip_high": 0.2}),
        ("dapo", {"aggregate": "prompt"}),
        ("gspo", {"clip_low": 1e-3}),
        ("gspo", {"clip_high": 1e-3}),
        ("cispo", {"ratio_max": 6.0}),
        ("cispo", {"ratio_min": 0.5}),
        ("aipo", {"ratio_max": 5.0}),
        ("topr", {"ratio_bounds_negative": None}),
        ("topr", {"ratio": "sequence"}),
        ("dppo", {"divergence_max": 0.25}),
        ("decoupled_ppo", {"proximal": ""}),
        ("decoupled_ppo", {"ratio_max": 6.0}),
        ("decoupled_ppo", {"ratio_min": 0.5}),
        ("grpo_k1_in_reward", {"reference_kl_in": "loss"}),
        ("grpo_k2_in_reward", {"reference_kl_form": "k3"}),
        ("reinforce_pp", {"advantage": "grpo"}),
        ("rloo", {"advantage": "centred"}),
        ("rloo", {"ratio": "token"}),
    ],
)
def test_another_setting_would_be_seen(update: Update, name: str, changed: dict[str, object]):
    other = preset_settings(name).model_copy(update=changed)
    assert difference(ALL[name], update, other).gradient > 1e-3


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", standardised(GROUP)),
        ("centred", centred(GROUP)),
        ("leave_one_out", against_others(GROUP)),
    ],
)
def test_group_advantages_equal_the_paper(kind: str, expected: list[float]):
    assert advantages(REWARDS, kind).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_batch_advantage_is_divided_once_by_the_deviation_of_the_whole_update(update: Update):
    """As if every answer had had its advantage from the start."""
    settings = preset_settings("reinforce_pp")
    loss, gradient = trainer_loss(update, settings, parts=3)
    plain = settings.model_copy(update={"advantage": "centred"})
    undivided, slope = trainer_loss(update, plain, parts=3)
    expected = over_batch(update.groups)[0][0] / centred(update.groups[0])[0]
    assert loss / undivided == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(gradient, slope * expected, rtol=1e-6, atol=0)


def test_the_guard_of_the_deviation_is_all_that_the_papers_lack(update: Update):
    """(R − mean)/(std + 1e-4), where the papers have (R − mean)/std."""
    std = float(np.std(REWARDS, ddof=1))
    plain = [one / std for one in centred(GROUP)]
    assert advantages(REWARDS, "grpo") * (1 + GUARD / std) == pytest.approx(plain, rel=1e-12)


def test_the_token_mean_is_over_the_update_and_equals_the_paper_for_one_prompt(update: Update):
    """DAPO's equation 8 has 1/Σ|o| within the expectation over prompts; `aggregate = "prompt"` is
    that. The preset follows the authors' code, which differs where prompts differ in length.
    """
    one = Update(update.groups[:1], update.policy[:1])
    assert difference(dapo_by_prompt, one, preset_settings("dapo")).worst < 1e-6
    assert difference(dapo, update, preset_settings("dapo")).worst < 1e-6
    assert difference(dapo_by_prompt, update, preset_settings("dapo")).gradient > 1e-2


def test_aipo_has_the_direction_of_the_paper(update: Update):
    """The paper sums over the tokens of an answer; the preset divides by their mean number."""
    _, gradient = trainer_loss(update, preset_settings("aipo"))
    _, expected = loss_and_gradient(ALL["aipo_by_answer"], update.groups, update.policy)
    answers = sum(map(len, update.groups))
    scaled = expected * answers / token_count(update.groups)
    assert torch.allclose(gradient, scaled, rtol=1e-6, atol=1e-9)


def test_dapo_shapes_the_rewards_of_long_answers():
    """Answers before, at, within and beyond the punished end; the advantages are of the shaped
    rewards, which is what the losses are compared with above.
    """
    lengths = {1: 1.0, 15: 1.0, 16: -1.0, 18: 1.0, 20: -1.0, 23: 1.0}
    given = {**OBJECTIVE_PRESETS["dapo"], "overlong_penalty": (16, 20)}
    rule = training_rule(TrainerSettings.model_validate(given), None, False)
    records = [
        msgspec.structs.replace(
            RECORD,
            trajectory=f"0.{number}",
            index=number,
            tokens=np.full(count + 1, 3, np.uint32),
            sources=np.array([0] + [1] * count, np.uint8),
            logprobs=np.full(count, -0.5, np.float32),
            spans=(Span(0, count, Version(0, 1)),),
            reward=reward,
        )
        for number, (count, reward) in enumerate(lengths.items())
    ]
    samples = prepare_group(0, records, {}, rule, 1).samples
    shaped = [
        Answer(reward + overlong_reward(count, 20, 4), (-0.5,) * count)
        for count, reward in lengths.items()
    ]
    assert [one.reward for one in shaped] == [1.0, 1.0, -1.0, 0.5, -2.0, 0.0]
    found = [sample.advantage for sample in samples]
    assert found == pytest.approx(standardised(shaped), rel=1e-6)


def test_samples_carry_the_tokens_of_their_group(update: Update):
    samples = samples_of(update, preset_settings("dapo_by_prompt"))
    assert sum(len(one.logprobs) / one.group_tokens for one in samples) == pytest.approx(6)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("name", CRITICS)
def test_a_critics_loss_and_gradient_equal_the_paper(name: str, parts: int):
    update = drawn_critic_update()
    found = trainer_critic_loss(update, critic_settings(CRITICS[name]), parts)
    assert compared(*found, *reference_critic_loss(update, CRITICS[name])).worst < 1e-6


@pytest.mark.parametrize("name", CRITICS)
def test_gradients_of_a_critics_reference_equal_difference_quotients(name: str):
    small = drawn_critic_update(episodes=4)
    _, gradient = reference_critic_loss(small, CRITICS[name])
    found = critic_quotients(small, CRITICS[name])
    assert torch.allclose(gradient, found, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    "changed", [{"gamma": 0.9}, {"gae_lambda": 0.9}, {"clip": 0.3}, {"action": "turn"}]
)
def test_another_setting_of_a_critic_would_be_seen(changed: dict[str, object]):
    update, settings = drawn_critic_update(), critic_settings(CRITICS["ppo"])
    other = settings.model_copy(update={"critic": settings.critic.model_copy(update=changed)})
    found = trainer_critic_loss(update, other)
    assert compared(*found, *reference_critic_loss(update, CRITICS["ppo"])).gradient > 1e-3
