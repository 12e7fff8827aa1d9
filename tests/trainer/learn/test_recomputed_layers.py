"""`trainer.gradient_checkpointing`: less is kept, the gradients are the same."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from rollstream.consumers.trainer.learn.forward import (
    forward_scores,
    policy_scorer,
    recompute_layers,
)
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.row_layout import token_rows
from rollstream.errors import ConfigurationError
from tests.trainer.learn.other_architectures import OTHERS, build_other
from tests.trainer.learn.test_learner_updates import stream, train
from tests.trainer.learning_reference import build, settings


def gradients(model, samples):
    scores = forward_scores(model, token_rows(samples))
    return torch.autograd.grad(scores.logprobs.sum(), list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_are_the_same_bits(samples, name):
    kept, again = build_other(name), build_other(name)
    recompute_layers(again)
    for one, other in zip(gradients(kept, samples), gradients(again, samples), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def kept_bytes(model, samples):
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes) or tensor, lambda t: t):
        forward_scores(model, token_rows(samples))
    return sum(kept)


def test_less_is_kept_for_the_backward_pass(samples):
    plain, again = build_other("gpt_neox"), build_other("gpt_neox")
    recompute_layers(again)
    assert kept_bytes(again, samples) < kept_bytes(plain, samples) / 2


def test_dropout_stays_off(samples):
    model = build("gpt2")
    assert model.config.resid_pdrop > 0
    recompute_layers(model.eval())
    assert all(map(torch.equal, gradients(model, samples), gradients(model, samples)))
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_learner_that_recomputes_learns_the_same(compute):
    updates, states = stream(2), []
    for again in (False, True):
        learner = TorchLearner(
            build_other("qwen3"), settings(compute=compute, gradient_checkpointing=again)
        )
        train(learner, updates)
        learner.close()
        states.append(learner.snapshot("float32"))
    worst = max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0])
    assert worst < 1e-5 if compute == "float32" else worst == 0  # the packed form rounds otherwise


def test_nothing_is_recomputed_without_gradients(samples):
    model, calls = build_other("gpt_neox"), []
    recompute_layers(model)
    model.gpt_neox.layers[0].attention.register_forward_hook(lambda *_: calls.append(1))  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
    policy = policy_scorer(model, general=True)
    calls.clear()
    with torch.no_grad():
        policy(token_rows(samples))
    assert len(calls) == 1
    policy(token_rows(samples)).logprobs.sum().backward()
    assert len(calls) == 3


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigurationError, match="Linear has no layers"):
        recompute_layers(torch.nn.Linear(2, 2))
