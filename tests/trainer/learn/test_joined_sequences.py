"""`trainer.varlen_attention`: sequences in one row, told apart by their lengths, have the scores
and gradients that they have in the present form; a model that cannot is refused.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollstream.consumers.trainer.learn.forward import (
    forward_scores,
    join_sequences,
    policy_scorer,
)
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.row_layout import token_grid, token_rows
from rollstream.errors import ConfigurationError
from tests.trainer.learn.other_architectures import build_other
from tests.trainer.learn.test_learner_updates import stream, train
from tests.trainer.learning_reference import build, largest_difference, settings

JOINING = ("mistral_windowed", "gemma3", "gpt_neox", "cohere_scaled", "mixtral", "qwen3")
REFUSED = ("gemma2_capped", "bloom_alibi", "mamba")


def logprobs_and_gradients(model, samples, joins):
    logprobs = policy_scorer(model, general=True, joins=joins)(token_rows(samples)).logprobs
    trained = list(model.parameters())
    return logprobs, torch.autograd.grad(logprobs.sum(), trained, materialize_grads=True)


@pytest.mark.parametrize("name", JOINING)
def test_scores_and_gradients_are_those_of_the_present_form(samples, name):
    (before, plain), (after, joined) = (
        logprobs_and_gradients(build_other(name), samples, joins) for joins in (False, True)
    )
    torch.testing.assert_close(after, before, atol=2e-5, rtol=0)
    for one, other in zip(plain, joined, strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_is_refused_by_the_settings_name(name):
    with pytest.raises(ConfigurationError, match=r"trainer\.varlen_attention: .* set it to false"):
        join_sequences(build_other(name))


class LargestMask(TorchDispatchMode):
    """The most elements that any boolean tensor had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.bool:
            self.elements = max(self.elements, out.numel())
        return out


def test_no_mask_is_made_and_no_cell_is_padding(samples):
    rows, largest = token_rows(samples), {}
    for joins in (False, True):
        score = policy_scorer(build_other("qwen3"), general=True, joins=joins)
        with LargestMask() as mode, torch.no_grad():
            score(rows)
        largest[joins] = mode.elements
    assert largest[True] <= max(rows.lengths) < largest[False]
    grid = token_grid(rows, packed=True, width=sum(rows.lengths))
    assert bool(grid.mask.all())
    assert grid.mask.shape == (1, sum(rows.lengths))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("again", [False, True])
def test_a_learner_learns_the_same(compute, again):
    states = []
    for joins in (False, True):
        changed = {"compute": compute, "gradient_checkpointing": again, "varlen_attention": joins}
        learner = TorchLearner(build("gpt2"), settings(**changed))
        train(learner, stream(2))
        learner.close()
        states.append(learner.snapshot("float32"))
    # Biases of keys have no gradient but rounding (softmax does not see them), which Adam enlarges.
    kept = [name for name in states[0] if "c_attn.bias" not in name]
    worst = largest_difference(*({name: state[name] for name in kept} for state in states))
    assert worst < (1e-4 if compute == "float32" else 5e-3)


def test_a_single_sequence_is_one_row(samples):
    model = build_other("qwen3")
    join_sequences(model)
    for part in (samples[:1], samples):
        rows = token_rows(part)
        joined = forward_scores(model, rows, "joined").logprobs
        alone = forward_scores(build_other("qwen3"), rows).logprobs
        torch.testing.assert_close(joined, alone, atol=2e-5, rtol=0)
