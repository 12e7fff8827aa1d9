"""The general forward: any causal decoder of transformers, sequences packed where they do not
affect each other, and never more logits than there are trained tokens.
"""

import copy

import pytest
import torch
import transformers
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rollstream.consumers.trainer.learn import scores
from rollstream.consumers.trainer.learn.forward import (
    can_pack,
    check_trainable,
    forward_scores,
    policy_scorer,
)
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.row_layout import first_fit, token_grid, token_rows
from rollstream.errors import ConfigurationError
from tests.trainer.learn.other_architectures import OTHERS, PACKED, PADDED, build_other
from tests.trainer.learning_reference import (
    SHAPE,
    VOCABULARY,
    largest_difference,
    reference_gradients,
    reference_logprobs,
    reference_loss,
    settings,
)


def one_by_one(model, samples):
    """log π of the trained tokens, each sample in a forward pass of its own."""
    with torch.no_grad():
        return torch.cat([reference_logprobs(model, one) for one in samples])


def furthest(found, expected):
    return float((found.detach() - expected).abs().max())


@pytest.mark.parametrize("name", OTHERS)
def test_scores_of_a_batch_are_those_of_its_sequences_alone(samples, name):
    model, rows = build_other(name), token_rows(samples)
    expected = one_by_one(model, samples)
    assert furthest(policy_scorer(model, general=True)(rows).logprobs, expected) < 2e-5
    assert furthest(forward_scores(model, rows).logprobs, expected) < 2e-5


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_share_a_row_is_found_by_trying(name):
    assert can_pack(build_other(name)) == (name in PACKED)


@pytest.mark.parametrize("name", PADDED)
def test_sharing_a_row_where_that_is_wrong_would_be_seen(samples, name):
    model, rows = build_other(name), token_rows(samples)
    wrong = forward_scores(model, rows, "packed").logprobs
    assert furthest(wrong, one_by_one(model, samples)) > 1e-2


@pytest.mark.parametrize("name", OTHERS)
def test_one_update_is_that_of_the_reference(samples, name):
    s = settings()
    learner = TorchLearner(build_other(name), s)
    learner.submit(samples)
    metrics = learner.finish_update()
    learner.close()
    prefix = "optimiser.mean."
    gradients = {
        key.removeprefix(prefix): tensor / (1 - s.betas[0])
        for key, tensor in learner.state().items()
        if key.startswith(prefix)
    }
    model = build_other(name)
    assert metrics["loss"] == pytest.approx(reference_loss(model, samples, s).item(), abs=1e-5)
    assert largest_difference(gradients, reference_gradients(model, samples, s)) < 1e-5


def test_the_body_runs_once_whatever_the_rows(samples):
    model, calls = build_other("mistral_windowed"), []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    for part in (samples, samples[:1], samples[3:5]):
        for form in ("padded", "packed"):
            forward_scores(model, token_rows(part), form)
    assert len(calls) == 6


class Widest(TorchDispatchMode):
    """The most logits that any tensor held."""

    logits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim > 1 and out.shape[-1] == VOCABULARY:
            is_head = out.shape[-2] == SHAPE["hidden_size"]
            self.logits = max(self.logits, 0 if is_head else out.numel())
        return out


def test_only_trained_tokens_have_logits_and_not_all_at_once(samples, monkeypatch):
    model, rows = build_other("gemma2_capped"), token_rows(samples)
    whole = forward_scores(model, rows, "packed")
    monkeypatch.setattr(scores, "LOGITS_MAX", 5 * VOCABULARY)
    with Widest() as seen:
        sliced = forward_scores(model, rows, "packed")
        sliced.logprobs.sum().backward()
    assert 0 < seen.logits <= 5 * VOCABULARY < len(rows.targets) * VOCABULARY
    assert furthest(sliced.logprobs, whole.logprobs.detach()) < 1e-5


def test_a_model_that_scores_rows_is_still_the_model(samples):
    model = build_other("gpt_neox")
    before = model(input_ids=torch.arange(9)[None]).logits
    forward_scores(model, token_rows(samples))
    assert torch.equal(model(input_ids=torch.arange(9)[None]).logits, before)
    other = copy.deepcopy(model)
    other.gpt_neox.embed_in.weight.data.zero_()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    rows = token_rows(samples)
    changed, kept = (forward_scores(m, rows).logprobs for m in (other, model))
    assert furthest(changed, kept.detach()) > 1e-2


def test_a_model_that_looks_ahead_is_refused():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(7)
    model = transformers.BertLMHeadModel(config)
    with pytest.raises(ConfigurationError, match="BertLMHeadModel cannot be trained"):
        check_trainable(model.eval())
    encoder = build_other("qwen3")
    encoder.config.is_causal = False
    for layer in encoder.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ConfigurationError, match="it is not causal"):
        check_trainable(encoder)


def test_a_model_whose_head_does_more_than_we_do_is_refused():
    model = build_other("gpt_neox")
    model.lm_head.register_forward_hook(lambda module, given, out: out + 1)
    with pytest.raises(ConfigurationError, match="are not its head's product"):
        check_trainable(model)


@pytest.mark.parametrize("packed", [True, False])
def test_every_token_has_its_place_in_the_grid(samples, packed):
    rows = token_rows(samples)
    grid = token_grid(rows, packed)
    assert int(grid.mask.sum()) == sum(rows.lengths)
    assert grid.tokens.shape[1] == max(rows.lengths)
    assert torch.equal(grid.tokens.flatten()[grid.scored], rows.tokens[rows.scored])
    assert torch.equal(grid.positions.flatten()[grid.scored], rows.positions[rows.scored])
    starts = int(((grid.positions == 0) & (grid.mask == 1)).sum())
    assert starts == len(samples)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 20))
def test_first_fit_overlaps_nothing_and_wastes_little(lengths, spare):
    lengths = sorted(lengths, reverse=True)
    width = lengths[0] + spare
    places = first_fit(lengths, width)
    cells = {
        (row, column + i)
        for (row, column), length in zip(places, lengths, strict=True)
        for i in range(length)
    }
    assert len(cells) == sum(lengths)
    assert max(column for _, column in cells) < width
    rows = 1 + max(row for row, _ in places)
    assert rows * width < 2 * sum(lengths) + width, "two rows are less than half full"
