"""The trainer's loss of episodes with a critic beside the reference's: that of policy and values
together, and its gradient with respect to the log-probabilities and the values of the trained
tokens. Import it as `testbed.objectives.critic_updates` everywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rollstream.consumers.credit import PartRewards
from rollstream.consumers.objective_settings import OBJECTIVE_PRESETS
from rollstream.consumers.objectives.critic.gae import judge
from rollstream.consumers.objectives.loss import (
    OtherLogprobs,
    reward_penalties,
    surrogate_loss,
)
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.row_layout import loss_inputs
from rollstream.consumers.trainer.learn.scores import TokenScores
from rollstream.streams.records import ENVIRONMENT, GENERATED, PROMPT
from rollstream.streams.values import Span, Version
from testbed.objectives.critic_reference import FORMS, CriticForm, Episode, ppo_loss
from testbed.objectives.updates import Difference, compared


def critic_settings(form: CriticForm) -> TrainerSettings:
    """The trainer's settings that mean `form`."""
    kl = {"reference_kl": form.kl, "reference_kl_in": "reward", "reference_kl_form": "k1"}
    critic = {
        "action": "turn" if form.by_turn else "token",
        "gamma": form.gamma,
        "gae_lambda": form.lambda_,
        "clip": None if form.clip == float("inf") else form.clip,
    }
    given = {**OBJECTIVE_PRESETS["ppo"], **(kl if form.kl else {}), "critic": critic}
    return TrainerSettings.model_validate(given)


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """Episodes with log π and values of their tokens, float32 numbers."""

    episodes: Sequence[Episode]
    logprobs: Sequence[Tensor]
    values: Sequence[Tensor]


def drawn_critic_update(seed: int = 5, episodes: int = 20) -> CriticUpdate:
    """Episodes of one to three turns whose ratios and values lie on both sides of every bound."""
    rng = np.random.default_rng([seed, 3])
    found = [_drawn(rng) for _ in range(episodes)]
    return CriticUpdate(*([one[i] for one in found] for i in range(3)))  # pyright: ignore[reportArgumentType]


def _drawn(rng: np.random.Generator) -> tuple[Episode, Tensor, Tensor]:
    turns = np.repeat(np.arange(rng.integers(1, 4)), rng.integers(2, 6))
    count = len(turns)

    def numbers(drawn: np.ndarray) -> tuple[float, ...]:
        return tuple(drawn.astype(np.float32).tolist())

    new = -rng.uniform(0.02, 2.0, count)
    old = np.minimum(new + rng.choice([0.05, 0.3, 1.0], count) * rng.normal(0, 1, count), -0.01)
    before = rng.normal(0.3, 0.5, count)
    trained = rng.random(count) > 0.2
    trained[rng.integers(count)] = True
    episode = Episode(
        numbers(old),
        numbers(np.minimum(old + rng.normal(0, 0.5, count), -0.01)),
        numbers(before),
        numbers(rng.normal(0, 1, count) * (rng.random(count) < 0.4)),
        tuple(turns.tolist()),
        tuple(trained.tolist()),
    )
    value = before + rng.choice([0.02, 0.5], count) * rng.normal(0, 1, count)
    return episode, torch.tensor(numbers(new)), torch.tensor(numbers(value))


def sample_of(episode: Episode, name: str) -> Sample:
    """The episode as the trainer gets it."""
    sources = [PROMPT]
    for t, turn in enumerate(episode.turn):
        if t and turn != episode.turn[t - 1]:
            sources.append(ENVIRONMENT)
        sources.append(GENERATED)
    count = len(episode.old)
    rewarded = [t for t in range(count) if episode.reward[t]]
    last = [t for t in range(count) if t + 1 == count or episode.turn[t + 1] != episode.turn[t]]
    return Sample(
        trajectory=name,
        group=0,
        tokens=np.ones(len(sources), np.uint32),
        sources=np.array(sources, np.uint8),
        logprobs=np.array(episode.old, np.float32),
        spans=(Span(0, count, Version(1, 1)),),
        reward=sum(episode.reward),
        advantage=0.0,
        temperature=1.0,
        mask=np.array(episode.trained),
        parts=PartRewards(
            count, np.array(rewarded, np.intp), np.array(episode.reward)[rewarded].astype(float)
        ),
        turn_ends=np.array(last, np.intp),
    )


def trainer_critic_loss(
    update: CriticUpdate, settings: TrainerSettings, parts: int = 1
) -> tuple[float, Tensor]:
    """The trainer's loss of policy and values, and its gradient with respect to log π and then the
    values of the trained tokens; the update comes in so many micro-batches.
    """
    samples = [sample_of(one, str(i)) for i, one in enumerate(update.episodes)]
    size = -(-len(samples) // parts)
    summed, weight, slopes = 0.0, 0.0, list[tuple[Tensor, Tensor]]()
    for first in range(0, len(samples), size):
        mine, chosen = slice(first, first + size), samples[first : first + size]
        masks = [torch.tensor(one.trained) for one in update.episodes[mine]]
        pairs = (update.logprobs[mine], update.values[mine])
        new, value = (
            torch.cat([n[m] for n, m in zip(one, masks, strict=True)]).requires_grad_()
            for one in pairs
        )
        references = [torch.tensor(one.reference) for one in update.episodes[mine]]
        reference = torch.cat([r[m] for r, m in zip(references, masks, strict=True)])
        old = np.concatenate(
            [np.array(one.value)[list(one.trained)] for one in update.episodes[mine]]
        )
        inputs, others = loss_inputs(chosen, version=1), OtherLogprobs(reference)
        penalties = reward_penalties(inputs, others, settings)
        judged = judge(value, old, chosen, inputs, penalties, settings)
        found = replace(inputs, advantage=judged.advantages)
        loss, sums = surrogate_loss(
            TokenScores(new, torch.zeros_like(new)), found, settings, others
        )
        whole = loss + judged.loss
        slopes.append(torch.autograd.grad(whole, (new, value)))  # pyright: ignore[reportArgumentType]
        summed, weight = summed + float(whole.detach()), weight + sums.weight
    gradients = [torch.cat([pair[i] for pair in slopes]).double() for i in range(2)]
    return summed / weight, torch.cat(gradients) / weight


def reference_critic_loss(update: CriticUpdate, form: CriticForm) -> tuple[float, Tensor]:
    """The same from the papers' formulas."""
    new, values = (
        [[x.double().requires_grad_() for x in one] for one in tensors]
        for tensors in (update.logprobs, update.values)
    )
    loss = ppo_loss(update.episodes, new, values, form)
    leaves = [
        x
        for tensors in (new, values)
        for one, episode in zip(tensors, update.episodes, strict=True)
        for x, is_trained in zip(one, episode.trained, strict=True)
        if is_trained
    ]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return float(loss.detach()), torch.stack(list(found))


def critic_quotients(update: CriticUpdate, form: CriticForm, step: float = 1e-6) -> Tensor:
    """The gradient of the papers' formulas by central differences."""
    new, values = (
        [[x.double() for x in one] for one in tensors]
        for tensors in (update.logprobs, update.values)
    )
    found: list[float] = []
    for tensors in (new, values):
        for one, episode in zip(tensors, update.episodes, strict=True):
            for t in np.flatnonzero(episode.trained).tolist():
                at = one[t]
                one[t] = at + step
                above = float(ppo_loss(update.episodes, new, values, form))
                one[t] = at - step
                below = float(ppo_loss(update.episodes, new, values, form))
                one[t] = at
                found.append((above - below) / (2 * step))
    return torch.tensor(found, dtype=torch.float64)


def critic_differences(seed: int = 5, parts: int = 1) -> Iterator[tuple[str, Difference]]:
    """Yields each of `FORMS` with the trainer's differences from the papers' formulas."""
    update = drawn_critic_update(seed)
    for name, form in FORMS.items():
        found = trainer_critic_loss(update, critic_settings(form), parts)
        yield name, compared(*found, *reference_critic_loss(update, form))
