"""One update on which every part of every published objective acts, and the trainer's loss of it
beside the reference's. Import it as `testbed.objectives.updates` everywhere.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rollstream.consumers.objective_settings import OBJECTIVE_PRESETS
from rollstream.consumers.objectives.loss import OtherLogprobs, surrogate_loss, update_divisor
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.advantages import advantages
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.row_layout import loss_inputs
from rollstream.consumers.trainer.learn.scores import TokenScores
from rollstream.streams.records import GENERATED, PROMPT
from rollstream.streams.values import Span, Version
from testbed.objectives.further_policies import KL_WEIGHT, OBJECTIVES, OTHER_OBJECTIVES
from testbed.objectives.reference import (
    DR_GRPO_LENGTH,
    Answer,
    Group,
    Objective,
    Policy,
    loss_and_gradient,
)

MEANS = (-0.5, -2e-4, 2e-4, 0.4, -6e-4, 8e-4)
"""Means of log r over the tokens of an answer: beside and within the bounds of a whole answer."""
OTHER_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "truncated_is": {},
    "ppo_clip": {"loss": "ppo_clip"},
    "dual_clip": {"loss": "ppo_clip", "clip_dual": 1.5},
    "dapo_by_prompt": {"loss": "ppo_clip", "aggregate": "prompt"},
    "aipo_by_answer": {**OBJECTIVE_PRESETS["aipo"], "aggregate": "constant"},
    "decoupled_unbounded": {**OBJECTIVE_PRESETS["decoupled_ppo"], "ratio_max": 1e9},
    **{
        f"grpo_{form}{'_in_reward' if place == 'reward' else ''}": {
            **OBJECTIVE_PRESETS["grpo"],
            "reference_kl": KL_WEIGHT,
            "reference_kl_form": form,
            "reference_kl_in": place,
        }
        for form in ("k1", "k2", "k3")
        for place in ("loss", "reward")
    },
}
"""Settings besides the presets → what they set."""


@dataclass(frozen=True, slots=True)
class Update:
    """Groups of answers with log π of their tokens, which are float32 numbers."""

    groups: Sequence[Group]
    policy: Policy


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest differences from the reference: of the loss relative to the sum of its parts'
    sizes and to itself, of the gradient relative to its largest component.
    """

    loss: float
    loss_alone: float
    gradient: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradient)


def drawn_update(seed: int = 5, prompts: int = 6, answers: int = 6) -> Update:
    """Groups whose ratios lie on both sides of every bound, with advantages of both signs."""
    rng, of_reference = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    of_proximal = np.random.default_rng([seed, 2])
    groups: list[Group] = []
    policy: list[list[Tensor]] = []
    for prompt in range(prompts):
        rewards = rng.permutation(np.linspace(-1, 1, answers) ** 3 + rng.normal(0, 0.2, answers))
        drawn = [_answer(rng, MEANS[(i + prompt) % len(MEANS)]) for i in range(answers)]
        groups.append(
            [
                Answer(float(r), old, _beside(of_reference, old, 0.5), _beside(of_proximal, old, 1))
                for r, (old, _) in zip(rewards, drawn, strict=True)
            ]
        )
        policy.append([new for _, new in drawn])
    return Update(groups, policy)


def _answer(rng: np.random.Generator, mean: float) -> tuple[tuple[float, ...], Tensor]:
    """log μ and log π of some tokens, neither above 0; the mean of their difference is given."""
    tokens = int(rng.integers(6, 15))
    moved = rng.choice([0.05, 0.35, 1.2], tokens) * rng.normal(0, 1.0, tokens)
    moved += mean - moved.mean()
    old = -np.maximum(moved, 0) - rng.uniform(0.02, 2.0, tokens)
    old, new = old.astype(np.float32), (old + moved).astype(np.float32)
    return tuple(old.tolist()), torch.from_numpy(new)


def _beside(rng: np.random.Generator, old: Sequence[float], distance: float) -> tuple[float, ...]:
    """Another policy's log-probabilities of an answer's tokens, on both sides of log μ."""
    moved = np.minimum(np.array(old) + rng.normal(0, distance, len(old)), -0.01)
    return tuple(moved.astype(np.float32).tolist())


def preset_settings(name: str) -> TrainerSettings:
    """The settings of a preset, or of one of `OTHER_SETTINGS`."""
    given = dict(OBJECTIVE_PRESETS.get(name) or OTHER_SETTINGS[name])
    if name == "dr_grpo":
        given["aggregate_tokens"] = DR_GRPO_LENGTH
    return TrainerSettings.model_validate(given)


def samples_of(update: Update, settings: TrainerSettings) -> list[Sample]:
    """The update as the trainer gets it, with the trainer's own advantages."""
    samples: list[Sample] = []
    for number, group in enumerate(update.groups):
        tokens = sum(len(answer.old) for answer in group)
        given = advantages([answer.reward for answer in group], settings.advantage)
        for answer, advantage in zip(group, given, strict=True):
            one = _sample(f"{number}.{len(samples)}", number, answer, float(advantage))
            samples.append(replace(one, group_tokens=tokens))
    return samples


def _sample(name: str, group: int, answer: Answer, advantage: float) -> Sample:
    count = len(answer.old)
    sources = np.array([PROMPT] + [GENERATED] * count, np.uint8)
    return Sample(
        trajectory=name,
        group=group,
        tokens=np.ones(count + 1, np.uint32),
        sources=sources,
        logprobs=np.array(answer.old, np.float32),
        spans=(Span(0, count, Version(1, 1)),),
        reward=answer.reward,
        advantage=advantage,
        temperature=1.0,
        mask=np.ones(count, np.bool_),
    )


def trainer_loss(update: Update, settings: TrainerSettings, parts: int = 1) -> tuple[float, Tensor]:
    """The trainer's loss of the update and its gradient with respect to log π, in float32; the
    update comes in so many micro-batches, whose sums are divided once.
    """
    samples = samples_of(update, settings)
    logprobs = [one for group in update.policy for one in group]
    answers = [answer for group in update.groups for answer in group]
    size = -(-len(samples) // parts)
    summed, gradients, sums = 0.0, list[Tensor](), None
    for first in range(0, len(samples), size):
        new = torch.cat(logprobs[first : first + size]).requires_grad_()
        inputs = loss_inputs(samples[first : first + size], version=1)
        scores = TokenScores(new, torch.zeros_like(new))
        mine = answers[first : first + size]
        others = OtherLogprobs(
            torch.cat([torch.tensor(answer.reference) for answer in mine]),
            torch.cat([torch.tensor(answer.proximal) for answer in mine]),
        )
        loss, found = surrogate_loss(scores, inputs, settings, others)
        gradients.append(torch.autograd.grad(loss, new)[0].double())
        summed += float(loss.detach())
        sums = found if sums is None else sums + found
    assert sums is not None
    divisor = update_divisor(sums, settings.advantage)
    return summed / divisor, torch.cat(gradients) / divisor


def difference(
    objective: Objective, update: Update, settings: TrainerSettings, parts: int = 1
) -> Difference:
    """The trainer's loss against the reference's. A loss is a sum of parts of both signs that
    nearly cancel, each about as large as its component of the gradient; so float32 rounds it
    relative to the sum of their sizes.
    """
    found = trainer_loss(update, settings, parts)
    return compared(*found, *loss_and_gradient(objective, update.groups, update.policy))


def compared(loss: float, gradient: Tensor, expected: float, slope: Tensor) -> Difference:
    """The differences of a loss and its gradient from those of a reference."""
    sizes = slope.abs()
    return Difference(
        abs(loss - expected) / max(abs(expected), float(sizes.sum())),
        abs(loss - expected) / abs(expected),
        float((gradient - slope).abs().max() / sizes.max()),
    )


def all_differences(update: Update, parts: int = 1) -> Iterator[tuple[str, Difference]]:
    """Yields each preset, and each of the other settings, with its differences."""
    for name, objective in {**OBJECTIVES, **OTHER_OBJECTIVES}.items():
        yield name, difference(objective, update, preset_settings(name), parts)
