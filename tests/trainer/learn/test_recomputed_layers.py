"""`trainer.gradient_checkpointing`: less is kept, the gradients are the same, in the packed form as
in transformers' forward.
"""

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
from rollstream.storage.model_folder.lora import attach_adapters
from tests.support.adapted_models import LORA
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
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_untied", "qwen2", "llama_scaled_rope"])
def test_the_packed_form_recomputes_the_same_bits_and_keeps_less(samples, name, has_adapter):
    model, found, sizes = build(name), [], []
    if has_adapter:
        attach_adapters(model, LORA, 0, torch.float32, "base")
    trained = [one for one in model.parameters() if one.requires_grad]
    for recomputes in (False, True):
        score, kept = policy_scorer(model, recomputes=recomputes), []
        with saved_tensors_hooks(lambda t, kept=kept: kept.append(t.nbytes) or t, lambda t: t):
            logprobs = score(token_rows(samples)).logprobs
        sizes.append(sum(kept))
        gradients = torch.autograd.grad(logprobs.sum(), trained, materialize_grads=True)
        found.append((logprobs.detach(), *gradients))
    assert all(map(torch.equal, *found))
    assert any(bool(one.any()) for one in found[1][1:])
    assert sizes[1] < sizes[0] / 2


def test_nothing_of_the_packed_form_is_recomputed_without_gradients(samples):
    score = policy_scorer(build(), recomputes=True)
    with torch.no_grad():
        logprobs = score(token_rows(samples)).logprobs
    assert not logprobs.requires_grad
    assert torch.equal(logprobs, score(token_rows(samples)).logprobs)


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
    with pytest.raises(ConfigurationError, match="gradient_checkpointing: Linear has no layers"):
        recompute_layers(torch.nn.Linear(2, 2))
