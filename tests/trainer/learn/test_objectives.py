"""The parts of an objective: masks, normalisers, regularisers, guards, presets, and a user's loss.
`test_objective_references.py` holds every preset to its paper's formula.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollstream.consumers.credit import GAE
from rollstream.consumers.objective_settings import ADVANTAGE_NAMES, OBJECTIVE_PRESETS
from rollstream.consumers.objectives.loss import surrogate_loss
from rollstream.consumers.trainer.data.advantages import advantages
from rollstream.consumers.trainer.data.rule_checks import check_advantage, check_choice
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.data.selection import freshest, oldest
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.row_layout import loss_inputs
from rollstream.consumers.trainer.learn.scores import TokenScores, score
from rollstream.consumers.trainer.learn.surrogate_check import check_surrogate
from rollstream.errors import ConfigurationError
from tests.trainer.learn.test_loss_against_references import update
from tests.trainer.learning_reference import build, largest_difference, settings


def scored(samples, apart=0.3):
    """Scores of the trained tokens whose ratios spread around 1."""
    inputs = loss_inputs(samples, version=7)
    random = np.random.default_rng(5).normal(0, apart, len(inputs.behaviour))
    logprobs = (inputs.behaviour + torch.from_numpy(random)).float().requires_grad_()
    return TokenScores(logprobs, torch.full_like(logprobs, 0.5)), inputs


def gradient_of(samples: list[Sample], apart: float = 0.3, **chosen: object):
    scores, inputs = scored(samples, apart)
    loss, sums = surrogate_loss(scores, inputs, settings(**chosen))
    (gradient,) = torch.autograd.grad(loss, [scores.logprobs])
    return gradient, sums, scores, inputs


def test_a_token_outside_the_ratio_mask_has_no_gradient_and_still_counts(samples):
    gradient, sums, scores, inputs = gradient_of(samples, mask_ratio=[0.8, 1.2])
    ratio = (scores.logprobs - inputs.behaviour).exp().detach()
    outside = (ratio < 0.8) | (ratio > 1.2)
    assert 0 < outside.sum() < len(outside)
    assert not gradient[outside].any()
    assert gradient[~outside & (inputs.advantage != 0)].all()
    assert sums.objective_sums["outliers"] == outside.sum()
    assert sums.weight == len(outside)


@pytest.mark.parametrize("name", ["mask_sequence", "mask_negative"])
def test_a_sequence_mask_takes_whole_sequences_out(samples, name):
    bounds: dict[str, object] = {"mask_sequence": [0.97, 1.03], "mask_negative": 0.02}
    gradient, sums, scores, inputs = gradient_of(samples, 0.3, **{name: bounds[name]})
    log_ratio = (scores.logprobs - inputs.behaviour).detach()
    masked = 0
    for index in range(inputs.sequences):
        mine = inputs.sequence == index
        mean = float(log_ratio[mine].mean())
        outside = not 0.97 <= np.exp(mean) <= 1.03
        if name == "mask_negative":
            outside = -mean > 0.02 and bool((inputs.advantage[mine] < 0).all())
        assert bool(gradient[mine].any()) != outside
        masked += int(mine.sum()) if outside else 0
    assert 0 < masked == sums.objective_sums["outliers"]


def test_prompts_weigh_alike_whatever_the_length_of_their_answers(samples):
    groups = {0: samples[:3], 1: samples[3:]}
    marked = []
    for group, members in groups.items():
        tokens = sum(int(one.mask.sum()) for one in members)
        marked += [replace(one, group=group, group_tokens=tokens) for one in members]
    _, whole = update(build(), [marked], settings(aggregate="prompt"))
    parts = [
        update(build(), [[x for x in marked if x.group == g]], settings(aggregate="token"))[1]
        for g in groups
    ]
    mean = {name: (parts[0][name] + parts[1][name]) / 2 for name in whole}
    assert largest_difference(whole, mean) < 1e-6


def test_micro_batches_of_prompts_add_up(samples):
    marked = [replace(one, group_tokens=40) for one in samples]
    s = settings(aggregate="prompt")
    whole, one = update(build(), [marked], s)
    parts, added = update(build(), [marked[:2], marked[2:]], s)
    assert largest_difference(one, added) < 1e-6
    assert parts["loss"] == pytest.approx(whole["loss"], abs=1e-6)


def test_a_constant_length_divides_the_sum_of_each_sequence(samples):
    _, by_constant = update(build(), [samples], settings(aggregate="constant", aggregate_tokens=10))
    _, by_token = update(build(), [samples], settings(aggregate="token"))
    tokens, sequences = sum(x.mask.sum() for x in samples), len(samples)
    scaled = {name: value * float(tokens) / (10 * sequences) for name, value in by_token.items()}
    assert largest_difference(by_constant, scaled) < 1e-6


def test_batch_advantages_are_divided_by_the_std_of_the_whole_update(samples):
    centred = [
        replace(x, advantage=a)
        for x, a in zip(samples, np.linspace(-2, 3, len(samples)), strict=True)
    ]
    deviation = np.sqrt(sum(x.advantage**2 for x in centred) / (len(centred) - 1)) + 1e-4
    divided = [replace(x, advantage=float(x.advantage / deviation)) for x in centred]
    _, streamed = update(build(), [centred[:3], centred[3:]], settings(advantage="batch"))
    _, whole = update(build(), [divided], settings(advantage="centred"))
    assert largest_difference(streamed, whole) < 1e-6
    assert list(advantages([1.0, 0.0], "batch")) == [0.5, -0.5]


def test_the_entropy_bonus_has_the_gradient_of_the_entropy():
    logits = torch.randn(4, 9, dtype=torch.float64).float().requires_grad_()
    temperature = torch.tensor([1.0, 0.7, 1.3, 1.0])
    found = score(logits, torch.tensor([0, 3, 8, 2]), temperature)
    (gradient,) = torch.autograd.grad(found.entropy.sum() + 2 * found.logprobs.sum(), [logits])
    logprobs = torch.log_softmax(logits / temperature[:, None], -1)
    entropy = -(logprobs.exp() * logprobs).sum()
    chosen = logprobs.gather(1, torch.tensor([[0], [3], [8], [2]])).sum()
    (expected,) = torch.autograd.grad(entropy + 2 * chosen, [logits])
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_regularisers_add_their_terms(samples):
    plain, _, scores, inputs = gradient_of(samples)
    penalised, *_ = gradient_of(samples, ratio_penalty=0.5)
    expected = plain + (scores.logprobs - inputs.behaviour).detach()
    assert torch.allclose(penalised, expected, atol=1e-6)
    base, _ = surrogate_loss(scores, inputs, settings())
    richer, _ = surrogate_loss(scores, inputs, settings(entropy_bonus=0.1))
    assert float((base - richer).detach()) == pytest.approx(
        0.1 * 0.5 * len(inputs.behaviour), rel=1e-5
    )


def test_the_dual_clip_bounds_the_loss_of_negative_answers(samples):
    wild = [replace(x, advantage=-1.0) for x in samples]
    _, sums, *_ = gradient_of(wild, apart=2.0, loss="ppo_clip")
    _, bounded, *_ = gradient_of(wild, apart=2.0, loss="ppo_clip", clip_dual=3.0)
    assert bounded.loss <= 3.0 * bounded.tokens
    assert bounded.loss < sums.loss


def test_the_guard_scales_or_skips_an_update_by_its_effective_samples(samples):
    metrics, _ = update(build(), [samples], settings())
    assert 0.0 < metrics["ess"] < 0.99
    scaled, _ = update(build(), [samples], settings(ess_guard="scale"))
    assert scaled["learning_rate"] == pytest.approx(metrics["learning_rate"] * metrics["ess"])
    learner = TorchLearner(build(), settings(ess_guard="skip", ess_min=1.0))
    before = learner.flat.clone()
    learner.submit(samples)
    assert learner.finish_update()["updates_skipped"] == 1
    assert torch.equal(before, learner.flat)
    learner.close()


@pytest.mark.parametrize("preset", OBJECTIVE_PRESETS)
def test_every_preset_is_valid_and_trains(samples, preset):
    chosen = {k: v for k, v in OBJECTIVE_PRESETS[preset].items() if k != "filter_equal_rewards"}
    _, gradients = update(build(), [samples], settings(**chosen))
    assert any(bool(gradient.any()) for gradient in gradients.values())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())


def mean_over_the_batch(tokens, settings):
    losses = -tokens.logprobs * (tokens.advantage - tokens.advantage.mean())
    return losses, torch.zeros_like(losses, dtype=torch.bool)


def detached(tokens, settings):
    return -tokens.logprobs.detach() * tokens.advantage, tokens.logprobs > 0


def summed(tokens, settings):
    return (-tokens.logprobs * tokens.advantage).sum(), tokens.logprobs > 0


def plain_gradient(tokens, settings):
    return -tokens.logprobs * tokens.advantage, torch.zeros_like(tokens.logprobs, dtype=torch.bool)


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [(mean_over_the_batch, "alone"), (detached, "no gradient"), (summed, "shape")],
)
def test_the_contract_names_what_a_surrogate_breaks(surrogate, message):
    with pytest.raises(ConfigurationError, match=message):
        check_surrogate(surrogate)


def test_a_users_loss_trains_like_the_built_in_one(samples):
    path = f"{__name__}:plain_gradient"
    check_surrogate(plain_gradient)
    _, mine = update(build(), [samples], settings(loss=path))
    _, built_in = update(build(), [samples], settings(ratio="none"))
    assert largest_difference(mine, built_in) < 1e-7
    with pytest.raises(ConfigurationError, match="have the shape"):
        TorchLearner(build(), settings(loss=f"{__name__}:summed"))


def ranks(rewards):
    return np.argsort(np.argsort(rewards)) - (len(rewards) - 1) / 2


def test_a_users_advantage_is_called_with_the_rewards_of_a_group():
    found = advantages([0.1, 0.9, 0.5], f"{__name__}:ranks")
    assert list(found) == [-1.0, 1.0, 0.0]
    with pytest.raises(ConfigurationError, match="one finite number for each"):
        advantages([0.1, 0.9], f"{__name__}:broken_advantage")


CALLS = [0]


def impure(rewards):
    CALLS[0] += 1
    return rewards - CALLS[0]


def changing(rewards):
    rewards -= rewards.mean()
    return rewards.copy()


def first_is_best(rewards):
    return rewards - rewards[0]


def divided_by_nothing(rewards):
    with np.errstate(invalid="ignore", divide="ignore"):
        return (rewards - rewards.mean()) / rewards.std()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (impure, "pure"),
        (changing, "changes the rewards"),
        (first_is_best, "order"),
        (divided_by_nothing, "one finite number"),
        (lambda rewards: rewards.mean(), "one finite number"),
    ],
)
def test_the_contract_names_what_an_advantage_breaks(function, message):
    with pytest.raises(ConfigurationError, match=message):
        check_advantage(function)


def first_two(candidates, groups):
    return [candidate.group for candidate in candidates][:2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (first_two, "at most 1"),
        (lambda candidates, groups: [9], "out of|at most"),
        (lambda candidates, groups: [], "no group"),
    ],
)
def test_the_contract_names_what_a_choice_breaks(function, message):
    with pytest.raises(ConfigurationError, match=message):
        check_choice(function)


def test_built_in_rules_keep_their_contracts():
    for kind in set(ADVANTAGE_NAMES) - {GAE}:
        check_advantage(lambda rewards, kind=kind: advantages(rewards, kind))
    check_advantage(ranks)
    for rule in (oldest, freshest):
        check_choice(rule)


def broken_advantage(rewards):
    return [float("nan")] * len(rewards)
