"""Masks against outliers (`trainer.mask_ratio`, `mask_sequence`, `mask_negative`)."""

from typing import Protocol

import torch
from torch import Tensor

from rollstream.consumers.objectives.losses.base import Bounds, LossInputs
from rollstream.consumers.objectives.ratios import sequence_sums


class MaskSettings(Protocol):
    @property
    def mask_ratio(self) -> Bounds | None: ...
    @property
    def mask_sequence(self) -> Bounds | None: ...
    @property
    def mask_negative(self) -> float | None: ...


@torch.no_grad()
def kept_tokens(
    token_log_ratio: Tensor, inputs: LossInputs, counts: Tensor, settings: MaskSettings
) -> Tensor | None:
    """Returns which tokens [G] keep their loss; None if no mask is set.

    `mask_ratio` compares the token's own ratio (IcePop; masked importance sampling),
    `mask_sequence` the geometric mean over its sequence, `mask_negative` the mean log μ/π of
    sequences with A < 0 (off-policy sequence mask of DeepSeek-V3.2).
    """
    # Masked tokens count in the total weight: a mask does not raise the weight of the others.
    unmasked: Tensor | None = None
    if settings.mask_ratio is not None:
        unmasked = _is_inside(token_log_ratio.exp(), settings.mask_ratio)
    if settings.mask_sequence is None and settings.mask_negative is None:
        return unmasked
    means = sequence_sums(token_log_ratio, inputs) / counts
    if settings.mask_sequence is not None:
        inside = _is_inside(means.exp(), settings.mask_sequence)[inputs.sequence]
        unmasked = inside if unmasked is None else unmasked & inside
    if settings.mask_negative is not None:
        near = (-means <= settings.mask_negative)[inputs.sequence] | (inputs.advantage >= 0)
        unmasked = near if unmasked is None else unmasked & near
    return unmasked


def _is_inside(values: Tensor, bounds: Bounds) -> Tensor:
    return (values >= bounds[0]) & (values <= bounds[1])
