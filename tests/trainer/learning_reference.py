"""Tiny models and samples for the tests of the learning core, and the losses written again from the
formulas.
"""

import math
from typing import Any

import numpy as np
import torch
import transformers

from rollstream.consumers.credit import whole_reward
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.streams.records import ENVIRONMENT, GENERATED, PROMPT
from rollstream.streams.values import Span, Version

VOCABULARY = 23
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
QWEN2_SHAPE: dict[str, Any] = {key: value for key, value in SHAPE.items() if key != "head_dim"}
ARCHITECTURES = {
    "qwen3_tied": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True)
    ),
    "qwen3_untied": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SHAPE, tie_word_embeddings=False, attention_bias=True)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**QWEN2_SHAPE)),
    "llama_scaled_rope": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SHAPE,
            mlp_bias=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128
        )
    ),
}


def build(name: str = "qwen3_tied") -> transformers.PreTrainedModel:
    """The same fp32 weights at each call, large enough that distributions are far from uniform."""
    torch.manual_seed(7)
    model = ARCHITECTURES[name]().float().eval()
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    return model


def settings(**changed: object) -> TrainerSettings:
    """Settings whose clipping never acts unless a test sets it."""
    base: dict[str, object] = {"workers": 1, "gradient_norm_max": 1e9, "lr_ramp_steps": 0}
    return TrainerSettings.model_validate(base | changed)


def turns(rng: np.random.Generator, count: int) -> np.ndarray:
    """Sources of a trajectory: a prompt, then turns of generated tokens with environment tokens
    between them.
    """
    parts = [np.full(rng.integers(1, 5), PROMPT)]
    for turn in range(count):
        if turn:
            parts.append(np.full(rng.integers(1, 4), ENVIRONMENT))
        parts.append(np.full(rng.integers(2, 9), GENERATED))
    return np.concatenate(parts).astype(np.uint8)


def sample(rng: np.random.Generator, name: str, turn_count: int = 2, masked: bool = True) -> Sample:
    """A sample of several turns and two versions, some tokens masked, some log μ far off."""
    sources = turns(rng, turn_count)
    generated = int((sources == GENERATED).sum())
    middle = generated // 2
    mask = rng.random(generated) > (0.3 if masked else -1.0)
    mask[0] = True
    ends = np.flatnonzero(np.diff(np.flatnonzero(sources == GENERATED), append=-1) != 1)
    return Sample(
        trajectory=name,
        group=0,
        tokens=rng.integers(0, VOCABULARY, len(sources)).astype(np.uint32),
        sources=sources,
        logprobs=rng.normal(-3.0, 0.5, generated).astype(np.float32),
        spans=(Span(0, middle, Version(3, 1)), Span(middle, generated, Version(5, 1))),
        reward=1.0,
        advantage=float(rng.normal()),
        temperature=float(rng.choice([0.7, 1.0])),
        mask=mask,
        parts=whole_reward(generated, 1.0),
        turn_ends=ends,
    )


def reference_logprobs(model: transformers.PreTrainedModel, one: Sample) -> torch.Tensor:
    """log π of the trained tokens by one plain forward pass of transformers over the unpadded
    sample.
    """
    tokens = torch.from_numpy(one.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0] / one.temperature
    logprobs = torch.log_softmax(logits, -1)
    at = [i for i in range(len(one.tokens)) if one.sources[i] == GENERATED]
    return torch.stack(
        [logprobs[i - 1, tokens[i]] for i, used in zip(at, one.mask, strict=True) if used]
    )


def reference_loss(
    model: transformers.PreTrainedModel, samples: list[Sample], s: TrainerSettings
) -> torch.Tensor:
    """The normalised loss of one update, sample by sample and token by token."""
    terms: list[list[torch.Tensor]] = []
    for one in samples:
        new = reference_logprobs(model, one)
        old = torch.from_numpy(one.logprobs[one.mask])
        ratios = torch.exp(new - old)
        if s.ratio == "sequence":
            ratios = torch.exp((new - old).mean()).expand(len(new))
        a, losses = one.advantage, []
        for logprob, r in zip(new, ratios, strict=True):
            if s.loss == "truncated_is":
                losses.append(-logprob * a * min(r.item(), s.ratio_max))
            else:
                bounded = torch.clamp(r, 1 - s.clip_low, 1 + s.clip_high)
                losses.append(-torch.minimum(r * a, bounded * a))
        terms.append(losses)
    if s.aggregate == "token":
        return sum(map(sum, terms)) / sum(map(len, terms))  # pyright: ignore[reportReturnType]
    return sum(sum(losses) / len(losses) for losses in terms) / len(terms)  # pyright: ignore[reportReturnType]


def reference_gradients(
    model: transformers.PreTrainedModel, samples: list[Sample], s: TrainerSettings
) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(reference_loss(model, samples, s), list(named.values()))
    return dict(zip(named, gradients, strict=True))


def relative_differences(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Of all values, relative to the largest expected one where that is above 1."""
    assert found.keys() == expected.keys()
    scale = max(1.0, *(float(tensor.detach().abs().max()) for tensor in expected.values()))
    pairs = [(found[name].detach(), expected[name].detach()) for name in expected]
    return torch.cat([(ours - theirs).abs().flatten().double() for ours, theirs in pairs]) / scale


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    worst = float(relative_differences(found, expected).max())
    return math.inf if math.isnan(worst) else worst


def assert_equal_but_for(
    enlarged: int, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Values differ by less than 1e-5, but for `enlarged` of them: where a gradient is little more
    than its rounding, Adam enlarges that. Those differ by a tenth of a step (lr .01) at most.
    """
    differences = relative_differences(found, expected)
    assert int((differences >= 1e-5).sum()) <= enlarged
    assert float(differences.max()) < 1e-3
