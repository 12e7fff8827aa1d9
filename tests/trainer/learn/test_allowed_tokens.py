"""Tokens that an engine chose from a part of the vocabulary, and arrays that a user's loss reads:
the trainer finds them by name, and computes the probabilities that the engine recorded.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.consumers.objectives.losses.base import SurrogateInputs
from rollstream.consumers.trainer.data.sample import Sample, sample_of
from rollstream.consumers.trainer.learn import scores
from rollstream.consumers.trainer.learn.forward import policy_scorer
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.row_layout import loss_inputs, token_rows
from rollstream.consumers.trainer.learn.surrogate_check import check_surrogate
from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.streams.records import Assignment
from rollstream.streams.token_arrays import NO_ARRAYS, TokenArrays, make_piece
from rollstream.streams.values import Sampling, Version
from tests.support.masked_engine import MaskedEngine, allowed_tokens
from tests.trainer.learn.test_mismatch import model
from tests.trainer.learning_reference import VOCABULARY, sample, settings

V0 = Version(0, 1)


def order(name: str) -> Assignment:
    prompt = np.arange(1, 5, dtype=np.uint32)
    sampling = Sampling(temperature=0.7, tokens_max=30, stop=(2,))
    return Assignment("start", name, 0, 0, 1, "r", 1, V0, "t", prompt, sampling, 7)


def generated(count: int, masked: bool = True) -> list[Sample]:
    policy = model()
    engine: Any = TorchEngine(policy.config, policy.state_dict(), V0, EngineOptions(count, 64, 8))
    engine = MaskedEngine(engine) if masked else engine
    running = {n: RunningTrajectory.start(order(n), None, 0.0) for n in map(str, range(count))}
    for one in running.values():
        request: GenerationRequest = one.request(hold=False)
        engine.submit(request)
    while emissions := engine.poll(10.0):
        for emission in emissions:
            running[emission.trajectory].extend(emission)
    return [sample_of(one.to_record(1, "stop", 1.0, V0, 1.0), 1.0) for one in running.values()]


def gap(samples: list[Sample], general: bool) -> float:
    with torch.no_grad():
        found = policy_scorer(model(), general=general)(token_rows(samples)).logprobs
    return float((found - loss_inputs(samples, 0).behaviour).abs().max())


@pytest.mark.parametrize("general", [False, True])
def test_trainer_and_engine_agree_with_allowed_tokens_and_without(general: bool) -> None:
    masked, free = generated(3), generated(3, masked=False)
    together = [masked[0], free[0], masked[1], free[1]]
    for samples in (masked, free, together):
        assert gap(samples, general) < 2e-5
    assert gap([replace(one, arrays=NO_ARRAYS) for one in masked], general) > 0.1


def test_tokens_that_were_not_allowed_have_no_probability_and_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = generated(3)
    rows = token_rows(samples)
    logits = torch.randn(len(rows.targets), VOCABULARY, requires_grad=True)
    allowed = scores.allowed_of(rows.allowed, rows.allowed_row)
    found = scores.score(logits, rows.targets, rows.temperature, allowed)
    (found.logprobs.sum() + found.entropy.sum()).backward()
    indices = np.concatenate([one.trained_tokens for one in samples])
    expected = torch.from_numpy(allowed_tokens(indices, VOCABULARY))
    scaled = (logits.detach() / rows.temperature[:, None]).masked_fill(~expected, -torch.inf)
    plain = torch.distributions.Categorical(logits=scaled)
    assert torch.allclose(found.logprobs, plain.log_prob(rows.targets), atol=1e-6)
    assert torch.allclose(found.entropy, plain.entropy(), atol=1e-5)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[~expected].any()
    assert logits.grad[expected].any()
    monkeypatch.setattr(scores, "LOGITS_MAX", 5 * VOCABULARY)
    whole = found.logprobs.detach()
    sliced = scores.score_through(
        lambda some: some, VOCABULARY, logits, rows.targets, rows.temperature, allowed
    )
    assert torch.allclose(sliced.logprobs, whole, atol=1e-6)


def test_a_step_on_allowed_tokens_measures_no_mismatch() -> None:
    learner = TorchLearner(model(), settings())
    try:
        learner.submit(generated(4))
        metrics = learner.finish_update()
    finally:
        learner.close()
    assert metrics["mismatch_max"] < 2e-5
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-4)


def weighted(tokens: SurrogateInputs, _: object) -> tuple[torch.Tensor, torch.Tensor]:
    """A user's loss: each token's weight is its confidence, 1 without one."""
    confidence, is_covered = tokens.batch.array("confidence", "float32")
    weight = torch.where(is_covered, confidence, 1.0)
    losses = -tokens.logprobs * tokens.advantage * weight
    return losses, torch.zeros_like(is_covered)


def test_a_users_loss_finds_an_array_by_name_and_zeros_where_it_has_no_row() -> None:
    check_surrogate(weighted)
    rng = np.random.default_rng(0)
    first, second, third = (sample(rng, name) for name in "abc")
    tokens = np.flatnonzero(first.sources == 1)
    values = rng.random(len(tokens)).astype(np.float32)
    whole = np.zeros(len(first.tokens), np.float32)
    whole[tokens] = values
    piece = make_piece("confidence", whole, 0)
    first = replace(first, arrays=TokenArrays((piece,)))
    # Another program's array of this name, but of another type, is none.
    other = make_piece("confidence", np.zeros((len(third.tokens), 2), np.uint8), 0)
    third = replace(third, arrays=TokenArrays((other,)))
    rows, is_covered = loss_inputs([second, first, third], 5).array("confidence", "float32")
    before, mine = int(second.mask.sum()), int(first.mask.sum())
    assert is_covered.tolist() == [False] * before + [True] * mine + [False] * int(third.mask.sum())
    assert rows[before : before + mine].tolist() == values[first.mask].tolist()
    assert not rows[~is_covered].any()
