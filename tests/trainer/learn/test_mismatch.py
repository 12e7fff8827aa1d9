"""Engine against trainer: the compared tokens, and the mismatch found when one of them is wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollstream.consumers.trainer.data.sample import Sample, sample_of
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.mismatch import TOKEN_MAX, LogprobGaps, logprob_gaps
from rollstream.look.monitor.concerns import warnings_of as concerns_of
from rollstream.look.monitor.snapshot import run_settings_of, take_snapshot
from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.run.config.settings import Configuration
from rollstream.streams.records import GENERATED, PROMPT, StepDone, Trajectory
from rollstream.streams.values import Sampling, Span, Version
from tests.trainer.learning_reference import SHAPE, reference_logprobs, settings

V0 = Version(0, 1)
FLOAT32 = {"weights": {"dtype": "float32"}, "rollouts": {"engine": "torch"}}
NOTHING = np.zeros(0, np.float32)


def model() -> PreTrainedModel:
    """Peaked enough that another temperature gives another distribution."""
    torch.manual_seed(3)
    made = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)).float().eval()
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return made


def generated(task: str, drawn_at: float, stated: float, count: int = 12) -> list[Trajectory]:
    """Samples of the engine itself, drawn at one temperature and recorded with another."""
    policy = model()
    engine = TorchEngine(policy.config, policy.state_dict(), V0, EngineOptions(count, 64))
    sampling = Sampling(temperature=drawn_at, tokens_max=40)
    prompt = np.arange(1, 5, dtype=np.uint32)
    sources = np.full(4, PROMPT, np.uint8)
    names = [f"{task}.{index}" for index in range(count)]
    for name in names:
        engine.submit(GenerationRequest(name, 0, prompt, sources, sampling, 7, NOTHING))
    tokens: dict[str, list[int]] = {name: [] for name in names}
    logprobs: dict[str, list[float]] = {name: [] for name in names}
    while emissions := engine.poll(10.0):
        for one in emissions:
            tokens[one.trajectory] += one.tokens.tolist()
            logprobs[one.trajectory] += one.logprobs.tolist()
    return [record(name, task, tokens[name], logprobs[name], stated) for name in names]


def record(
    name: str, task: str, tokens: list[int], logprobs: list[float], temperature: float
) -> Trajectory:
    return Trajectory(
        trajectory=name,
        group=0,
        index=0,
        attempt=1,
        task=task,
        rollout="rollout-0",
        rollout_term=1,
        tokens=np.array([1, 2, 3, 4, *tokens], np.uint32),
        sources=np.array([PROMPT] * 4 + [GENERATED] * len(tokens), np.uint8),
        logprobs=np.array(logprobs, np.float32),
        spans=(Span(0, len(tokens), V0),),
        finish="length",
        reward=1.0,
        trainer_version=V0,
        started_s=0.0,
        finished_s=1.0,
        temperature=temperature,
    )


def trained(records: list[Trajectory], **changed: object) -> dict[str, float]:
    """Metrics of the first update on these records, in two micro-batches."""
    learner = TorchLearner(model(), settings(**changed))
    try:
        samples = [sample_of(one, 0.5) for one in records]
        for half in (samples[::2], samples[1::2]):
            learner.submit(half)
        return learner.finish_update()
    finally:
        learner.close()


def warnings_of(metrics: dict[str, float]) -> list[tuple[str, str]]:
    plan = run_settings_of(Configuration.model_validate(FLOAT32))
    state = plan.state()
    state.apply(StepDone(1, Version(1, 1), "00", 1, metrics, {}, 1.0), 1.0)
    found = concerns_of(take_snapshot(state, plan, 1.0))
    return [(one.kind, one.what) for one in found if one.kind.startswith("mismatch")]


def test_engine_and_trainer_agree_and_nothing_is_warned_of() -> None:
    metrics = trained([*generated("sums", 1.0, 1.0), *generated("words", 0.7, 0.7)])
    for task in ("sums", "words"):
        assert metrics[f"mismatch_tokens/{task}"] == 12 * 40
        assert metrics[f"mismatch_max/{task}"] < 1e-4
        assert metrics[f"mismatch_above/{task}"] == 0
    assert metrics["mismatch_tokens"] == 2 * 12 * 40
    assert warnings_of(metrics) == []


def test_an_engine_with_a_wrong_temperature_is_reported_by_task() -> None:
    metrics = trained([*generated("sums", 1.0, 1.0), *generated("words", 0.7, 1.0)])
    assert metrics["mismatch_max/sums"] < 1e-4
    assert metrics["mismatch_mean/words"] > 0.05
    ((kind, what),) = warnings_of(metrics)
    assert kind == "mismatch/words"
    assert "480 tokens of task words under the same version" in what


def test_figures_are_those_of_the_formulas(samples: list[Sample]) -> None:
    policy = model()
    ours = [reference_logprobs(policy, one) for one in samples]
    gaps = logprob_gaps(torch.cat(ours), samples, 3)
    deltas = [
        (mine.detach().double().numpy() - one.logprobs[one.mask])[
            : one.mask[: one.spans[0].end].sum()
        ]
        for mine, one in zip(ours, samples, strict=True)
    ]
    delta = np.concatenate(deltas)
    found = gaps.metrics()
    assert found["mismatch_tokens"] == len(delta)
    assert found["mismatch_mean"] == pytest.approx(np.abs(delta).mean())
    assert found["mismatch_max"] == pytest.approx(np.abs(delta).max())
    assert found["mismatch_kl"] == pytest.approx((np.exp(delta) - 1 - delta).mean())
    assert found["mismatch_above"] == pytest.approx((np.abs(delta) > TOKEN_MAX).mean())


def test_tokens_after_a_change_of_weights_are_not_compared(samples: list[Sample]) -> None:
    """Their KV cache may be of the version before."""
    first = sum(int(one.mask[: one.spans[0].end].sum()) for one in samples)
    everything = sum(int(one.mask.sum()) for one in samples)
    gaps = logprob_gaps(torch.zeros(everything), samples, 3)
    assert gaps.metrics()["mismatch_tokens"] == first < everything


def test_without_a_token_of_lag_0_the_nearest_lag_is_reported_separately(
    samples: list[Sample],
) -> None:
    count = sum(int(one.mask.sum()) for one in samples)
    named = [replace(one, task="old") for one in samples]
    found = logprob_gaps(torch.zeros(count), named, 5).metrics()
    assert found["mismatch_tokens"] == found["mismatch_tokens/old"] == 0
    assert found["mismatch_near_lag/old"] == 2
    assert "mismatch_mean/old" not in found
    assert "mismatch_mean" not in found


def test_parts_combine_to_the_whole_and_the_smaller_lag_counts(samples: list[Sample]) -> None:
    logprobs = torch.randn(
        sum(int(one.mask.sum()) for one in samples), generator=torch.manual_seed(0)
    )
    counts = [int(one.mask.sum()) for one in samples]
    parts = [
        logprob_gaps(part, [one], 3)
        for part, one in zip(logprobs.split(counts), samples, strict=True)
    ]
    together = sum(parts, LogprobGaps()).metrics()
    assert together == pytest.approx(logprob_gaps(logprobs, samples, 3).metrics())
    older = logprob_gaps(logprobs, samples, 4)
    assert (older + logprob_gaps(logprobs, samples, 3)).metrics()["mismatch_tokens"] > 0


def test_no_version_no_comparison() -> None:
    """The second update of a step trains from weights that were never served."""
    learner = TorchLearner(model(), settings(updates_per_step=2))
    try:
        batch = [sample_of(one, 0.5) for one in generated("sums", 1.0, 1.0, count=2)]
        learner.submit(batch)
        assert "mismatch_mean/sums" in learner.finish_update()
        learner.submit(batch)
        assert not [name for name in learner.finish_update() if name.startswith("mismatch")]
    finally:
        learner.close()


@pytest.mark.parametrize(("near", "warned"), [(0.9, 0), (1.1, 1)])
def test_another_lag_warns_only_of_what_training_cannot_explain(near: float, warned: int) -> None:
    metrics = {
        "mismatch_tokens/sums": 0.0,
        "mismatch_near_lag/sums": 2.0,
        "mismatch_near_mean/sums": near,
    }
    assert len(warnings_of(metrics)) == warned


def test_a_broken_logprob_keeps_the_figures_finite(samples: list[Sample]) -> None:
    count = sum(int(one.mask.sum()) for one in samples)
    found = logprob_gaps(torch.full((count,), 1e4), samples, 3).metrics()
    assert all(np.isfinite(value) for value in found.values())
