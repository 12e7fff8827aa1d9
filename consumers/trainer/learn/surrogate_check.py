"""Tries a user's loss on a small batch with ratios near and far from 1 and advantages of both
signs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollstream.consumers.objective_settings import ObjectiveSettings
from rollstream.consumers.objectives.losses.base import LossInputs, Surrogate, SurrogateInputs
from rollstream.consumers.objectives.losses.kinds import find_surrogate, loss_kinds
from rollstream.errors import ConfigurationError

LENGTHS = 3, 5, 1, 4
ADVANTAGES = 1.5, -0.7, 0.0, -2.0
TOLERANCE = 1e-9


def check_own_loss(settings: ObjectiveSettings) -> None:
    """Tries the loss, so that a learner refuses a user's function before the first take. Raises
    `ConfigurationError`.
    """
    surrogate = find_surrogate(settings.loss)
    if settings.loss not in loss_kinds():
        check_surrogate(surrogate, settings)


def check_surrogate(surrogate: Surrogate, settings: ObjectiveSettings | None = None) -> None:
    """Raises `ConfigurationError`, which names the broken rule, unless the function

    * returns losses and flags of the shape of `logprobs`, the losses finite;
    * has a finite gradient in `logprobs` for each token with an advantage;
    * returns equal results when it is called again, and leaves its inputs as they were;
    * gives each sequence the losses that it gives it alone, so that micro-batches add up.
    """
    chosen = settings or ObjectiveSettings()
    inputs = _batch(range(len(LENGTHS)))
    before = [tensor.detach().clone() for tensor in _tensors(inputs)]
    losses, flags = surrogate(inputs, chosen)
    for name, values in (("losses", losses), ("flags", flags)):
        if values.shape != inputs.logprobs.shape:
            _refuse(
                f"{name} have the shape {tuple(values.shape)}, not {tuple(inputs.logprobs.shape)}"
            )
    if not bool(losses.isfinite().all()):
        _refuse("a loss is not finite")
    repeated, _ = surrogate(inputs, chosen)
    if not torch.equal(losses, repeated):
        _refuse("a second call returns other losses; it must be pure")
    if not all(map(torch.equal, before, _tensors(inputs))):
        _refuse("it changes its inputs")
    _check_gradient(losses, inputs)
    for index in range(len(LENGTHS)):
        alone, _ = surrogate(_batch([index]), chosen)
        mine = losses[inputs.batch.sequence == index]
        if not torch.allclose(alone, mine, atol=TOLERANCE, rtol=0):
            _refuse(
                "a sequence has other losses alone than beside others; sums would depend on "
                "how sequences are divided into micro-batches"
            )


def _check_gradient(losses: Tensor, batch: SurrogateInputs) -> None:
    if not losses.requires_grad:
        _refuse("the losses have no gradient: is log π or the ratio detached?")
    (gradient,) = torch.autograd.grad(losses.sum(), [batch.logprobs])
    if not bool(gradient.isfinite().all()):
        _refuse("a gradient is not finite")
    if not bool(gradient.any()):
        _refuse("the gradient is 0 everywhere")


def _refuse(rule: str) -> None:
    raise ConfigurationError(f"trainer.loss: {rule} (docs/explanation/learning.md, Your own parts)")


def _tensors(inputs: SurrogateInputs) -> Sequence[Tensor]:
    batch = inputs.batch
    return inputs.logprobs, inputs.log_ratio, batch.behaviour, batch.advantage, batch.sequence


def _batch(chosen: Sequence[int]) -> SurrogateInputs:
    logprobs: list[Tensor] = []
    behaviour: list[Tensor] = []
    sequence: list[int] = []
    advantage: list[float] = []
    for place, index in enumerate(chosen):
        # By index alone: a sequence has the same numbers in every batch.
        random = torch.Generator().manual_seed(index)
        length = LENGTHS[index]
        new = -3 * torch.rand(length, generator=random, dtype=torch.float64) - 0.05
        log_ratio = torch.randn(length, generator=random, dtype=torch.float64)
        logprobs.append(new)
        behaviour.append((new - log_ratio).clamp(max=-0.01))
        sequence += [place] * length
        advantage += [ADVANTAGES[index]] * length
    new = torch.cat(logprobs).requires_grad_()
    old = torch.cat(behaviour)
    batch = LossInputs(
        old,
        torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(sequence),
        len(chosen),
        torch.zeros(len(sequence), dtype=torch.int64),
        torch.ones(len(chosen), dtype=torch.float64),
        0,
    )
    return SurrogateInputs(new, new - old, batch)
