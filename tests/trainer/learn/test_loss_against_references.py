"""Losses and gradients of the learner equal plain references through transformers' own forward, to
1e-6.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from rollstream.consumers.objectives.loss import surrogate_loss
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn import scores
from rollstream.consumers.trainer.learn.forward import forward_scores, policy_scorer
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.llama import has_packed_form
from rollstream.consumers.trainer.learn.row_layout import loss_inputs, token_rows
from tests.trainer.learning_reference import (
    ARCHITECTURES,
    build,
    largest_difference,
    reference_gradients,
    reference_logprobs,
    reference_loss,
    sample,
    settings,
)

VARIANTS = list(product(["truncated_is", "ppo_clip"], ["token", "sequence"], ["token", "sequence"]))


def update(model, batches, s):
    """One update; the gradient is read from Adam's first moment, which is (1 − β₁) times it."""
    learner = TorchLearner(model, s)
    for batch in batches:
        learner.submit(batch)
    metrics = learner.finish_update()
    prefix = "optimiser.mean."
    gradients = {
        name.removeprefix(prefix): tensor / (1 - s.betas[0])
        for name, tensor in learner.state().items()
        if name.startswith(prefix)
    }
    learner.close()
    return metrics, gradients


@pytest.mark.parametrize(("loss", "ratio", "aggregate"), VARIANTS)
def test_every_loss_equals_its_formula(samples, loss, ratio, aggregate):
    bound = 2.0 if ratio == "token" else 0.5  # means over a sequence stay below 1 here
    s = settings(loss=loss, ratio=ratio, aggregate=aggregate, ratio_max=bound)
    metrics, gradients = update(build(), [samples], s)
    assert metrics["loss"] == pytest.approx(reference_loss(build(), samples, s).item(), abs=1e-6)
    assert largest_difference(gradients, reference_gradients(build(), samples, s)) < 1e-6
    assert metrics["clipped"] > 0, "a reference that nothing clips would not see the bounds"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_equals_its_transformers_forward(samples, name):
    metrics, gradients = update(build(name), [samples], settings())
    expected = reference_loss(build(name), samples, settings()).item()
    assert metrics["loss"] == pytest.approx(expected, abs=1e-6)
    expected = reference_gradients(build(name), samples, settings())
    assert largest_difference(gradients, expected) < 1e-6


def test_known_families_take_the_packed_form_and_others_do_not():
    packed = {name for name in ARCHITECTURES if has_packed_form(build(name))}
    assert packed == set(ARCHITECTURES) - {"gpt2"}


def test_packed_and_general_form_score_alike(samples):
    model, rows = build(), token_rows(samples)
    packed, general = policy_scorer(model)(rows), forward_scores(model, rows)
    assert torch.allclose(packed.logprobs, general.logprobs, atol=2e-6)
    assert torch.allclose(packed.entropy, general.entropy, atol=2e-6)


def test_a_large_vocabulary_is_scored_in_slices_with_equal_results(samples, monkeypatch):
    whole = update(build(), [samples], settings())
    monkeypatch.setattr(scores, "LOGITS_MAX", 23 * 7)
    sliced = update(build(), [samples], settings())
    assert sliced[0]["loss"] == pytest.approx(whole[0]["loss"], abs=1e-6)
    assert largest_difference(sliced[1], whole[1]) < 1e-6


def test_streamed_micro_batches_equal_one_big_batch(samples):
    for aggregate in ("token", "sequence"):
        s = settings(aggregate=aggregate)
        whole, one = update(build(), [samples], s)
        parts, added = update(build(), [samples[:5], samples[5:6], samples[6:]], s)
        assert largest_difference(one, added) < 1e-6
        for name in ("loss", "entropy", "kl", "ratio_mean", "ess", "clipped", "ratio_max"):
            assert parts[name] == pytest.approx(whole[name], rel=1e-5), name
        assert parts["tokens"] == whole["tokens"] == sum(x.mask.sum() for x in samples)


def on_policy(samples: list[Sample]) -> list[Sample]:
    """The samples as if the model itself had just generated them."""
    model = build()
    recorded = []
    for one in (replace(x, mask=np.ones_like(x.mask)) for x in samples):
        recorded.append(replace(one, logprobs=reference_logprobs(model, one).detach().numpy()))
    return recorded


def test_truncated_is_on_policy_is_reinforce(samples):
    fresh = on_policy(samples)
    metrics, gradients = update(build(), [fresh], settings(ratio_max=2.0))
    model = build()
    total = sum(-(reference_logprobs(model, x) * x.advantage).sum() for x in fresh)
    tokens = sum(len(x.logprobs) for x in fresh)
    named = dict(model.named_parameters())
    plain = torch.autograd.grad(total / tokens, list(named.values()))  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert largest_difference(gradients, dict(zip(named, plain, strict=True))) < 1e-6
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ess"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clipped"] == 0


def test_environment_and_masked_tokens_are_context_only(samples):
    rng = np.random.default_rng(3)
    one = sample(rng, "t", turn_count=3)
    changed = np.where(one.mask, one.logprobs, -50.0).astype(np.float32)
    before = update(build(), [[one]], settings())
    after = update(build(), [[replace(one, logprobs=changed)]], settings())
    assert largest_difference(before[1], after[1]) == 0
    assert before[0]["tokens"] == one.mask.sum() < len(one.mask) < (one.sources > 0).sum()
    assert before[0]["masked_tokens"] == (~one.mask).sum()


def test_lag_is_counted_token_by_token_over_the_spans(samples):
    judged = loss_inputs(samples, version=9)
    _, sums = surrogate_loss(policy_scorer(build())(token_rows(samples)), judged, settings())
    early = sum(int(x.mask[: x.spans[0].end].sum()) for x in samples)
    late = sum(int(x.mask.sum()) for x in samples) - early
    assert sums.lag == 6 * early + 4 * late
    assert sums.lag_max == 6


def test_a_broken_log_probability_does_not_break_the_update(samples):
    broken = replace(samples[0], logprobs=np.full_like(samples[0].logprobs, -1e30))
    for loss in ("truncated_is", "ppo_clip"):
        metrics, gradients = update(build(), [[broken, *samples[1:]]], settings(loss=loss))
        assert np.isfinite(metrics["loss"])
        assert all(g.isfinite().all() for g in gradients.values())
