"""LoRA: only adapters are trained, by the same gradients in each forward, over a frozen base."""

import pytest
import torch

from rollstream.consumers.trainer.learn.forward import policy_scorer
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.row_layout import token_rows
from rollstream.errors import ConfigurationError
from rollstream.storage.model_folder.lora import attach_adapters
from rollstream.storage.settings import LoraSettings
from rollstream.storage.weights.adapters import AdapterTensors
from rollstream.storage.weights.tensors import local_tensors
from tests.support.adapted_models import LORA, adapted, merged
from tests.trainer.learn.other_architectures import build_other
from tests.trainer.learn.test_learner_updates import stream, train
from tests.trainer.learning_reference import build, settings

FAMILIES = ["llama_scaled_rope", "qwen2", "qwen3_tied", "qwen3_untied"]


def attached(name="qwen3_tied", lora=LORA, seed=0):
    model = build(name)
    attach_adapters(model, lora, seed, torch.float32, "base")
    return model


def scores_and_gradients(model, samples, general):
    rows = token_rows(samples)
    logprobs = policy_scorer(model, general=general)(rows).logprobs
    trained = [p for p in model.parameters() if p.requires_grad]
    return logprobs.detach(), torch.autograd.grad(logprobs.sum(), trained, materialize_grads=True)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "up_proj"), ("o_proj",)])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_packed_forward_is_that_of_transformers(samples, name, targets):
    plain = build(name)
    model = adapted(plain, LoraSettings(rank=3, alpha=6.0, targets=targets))
    with torch.no_grad():
        whole = policy_scorer(merged(model, plain), general=True)(token_rows(samples)).logprobs
    (found, packed), (whole_found, general) = (
        scores_and_gradients(model, samples, general) for general in (False, True)
    )
    torch.testing.assert_close(found, whole, atol=2e-5, rtol=0)
    torch.testing.assert_close(whole_found, whole, atol=2e-5, rtol=0)
    for mine, other in zip(packed, general, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changed", [{}, {"compute": "bfloat16"}, {"gradient_checkpointing": True}])
def test_only_adapters_are_trained_kept_and_published(changed):
    learner = TorchLearner(attached(), settings(**changed))
    before = learner.snapshot("float32")
    assert isinstance(before, AdapterTensors)
    base = dict(local_tensors(before.base()))
    train(learner, stream(2))
    after = learner.snapshot("float32")
    assert isinstance(after, AdapterTensors)
    learner.close()
    assert all("lora_" in name for name in learner.state() if name.startswith("masters."))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(
        torch.equal(base[name], tensor) for name, tensor in local_tensors(after.base()).items()
    )
    assert set(base) == set(build().state_dict())


def test_an_untrained_adapter_changes_nothing(samples):
    rows = token_rows(samples)
    with torch.no_grad():
        plain, own = (policy_scorer(m)(rows).logprobs for m in (build(), attached()))
    assert torch.equal(plain, own)


def test_a_restored_learner_continues_with_equal_bits():
    updates = stream(4)
    whole = TorchLearner(attached(), settings())
    train(whole, updates)
    first = TorchLearner(attached(), settings())
    train(first, updates[:2])
    again = TorchLearner(attached(seed=5), settings())  # the start of A is in the checkpoint too
    again.load_state(first.state())
    assert again.state_hash() == first.state_hash()
    train(again, updates[2:])
    assert again.state_hash() == whole.state_hash()
    for learner in (whole, first, again):
        learner.close()


def test_the_state_of_another_base_is_refused():
    learner = TorchLearner(attached(), settings())
    other = build()
    next(other.parameters()).data.add_(1.0)
    attach_adapters(other, LORA, 0, torch.float32, "base")
    foreign, plain = TorchLearner(other, settings()), TorchLearner(build(), settings())
    for one, state in ((learner, foreign), (learner, plain), (plain, learner)):
        with pytest.raises(ConfigurationError, match="another base model"):
            one.load_state(state.state())
    for one in (learner, foreign, plain):
        one.close()


def test_other_architectures_are_adapted_by_their_layers(samples):
    plain = build_other("gpt_neox")
    model = adapted(plain, LoraSettings(rank=2, targets=("query_key_value",)))
    with torch.no_grad():
        mine, whole = (
            policy_scorer(m)(token_rows(samples)).logprobs for m in (model, merged(model, plain))
        )
    torch.testing.assert_close(mine, whole, atol=2e-5, rtol=0)


def test_a_target_that_the_model_does_not_have_is_named():
    with pytest.raises(ConfigurationError, match=r"no linear layer 'lm_head'.*q_proj"):
        attach_adapters(build(), LoraSettings(rank=2, targets=("lm_head",)), 0, torch.float32, "x")
