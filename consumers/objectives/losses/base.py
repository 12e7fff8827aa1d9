"""The inputs of a loss and the base of its own settings. π is the policy being trained, μ the
policy that emitted the token, A the advantage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from rollstream.storage.settings import Settings
from rollstream.streams.token_arrays import TokenArrays

if TYPE_CHECKING:
    from torch import Tensor

Bounds = tuple[float, float]
"""Lower and upper bound; a value equal to one of them is inside."""


class LossSettings(Settings):
    """Base of the settings that belong to one loss. In a file they stand in `[trainer.loss]` beside
    `kind`; everywhere else they are settings of `trainer`, so their names and defaults are those of
    all losses together.
    """

    takes_no_ratio: ClassVar[bool] = False
    """Whether the loss works with `trainer.ratio = "none"`: it bounds nothing but the weight."""
    takes_proximal: ClassVar[bool] = False
    """Whether `trainer.proximal` may be the centre of its bounds (decoupled PPO)."""


class SampleArrays(Protocol):
    """What a loss reads of a `Sample` (`consumers/trainer/data/sample.py`)."""

    @property
    def trained_tokens(self) -> NDArray[np.int64]: ...
    @property
    def arrays(self) -> TokenArrays: ...


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The loss inputs of the G trained tokens, besides their scores: `behaviour` [G], the
    log-probability that the engine recorded under the token's own version; `advantage` and `lag`
    [G] (in versions); `sequence` [G], the index of its sequence among the `sequences` with a
    trained token. `prompt_share` [sequences] is 1 / (trained tokens of the group). `masked` counts
    generated tokens that are not trained. `samples` are those of the tokens.
    """

    behaviour: "Tensor"
    advantage: "Tensor"
    sequence: "Tensor"
    sequences: int
    lag: "Tensor"
    prompt_share: "Tensor"
    masked: int
    samples: Sequence[SampleArrays] = ()

    def array(self, name: str, dtype: str, shape: tuple[int, ...] = ()) -> "tuple[Tensor, Tensor]":
        """The rows [G, *shape] of the trained tokens in the array `name` that engines wrote
        (`streams/token_arrays.py`), zeros for a token without a row of this type and shape, and
        whether [G] it has one.
        """
        import torch

        count, device = len(self.behaviour), self.behaviour.device
        rows = np.zeros((count, *shape), dtype)
        is_covered = np.zeros(count, np.bool_)
        at = 0
        for sample in self.samples:
            tokens = sample.trained_tokens
            array = sample.arrays.get(name, dtype, shape)
            if array is not None:
                rows[at : at + len(tokens)], is_covered[at : at + len(tokens)] = array.at(tokens)
            at += len(tokens)
        return torch.as_tensor(rows, device=device), torch.as_tensor(is_covered, device=device)


@dataclass(frozen=True, slots=True)
class SurrogateInputs:
    """The surrogate inputs of the G trained tokens of a micro-batch: `logprobs` [G] under π and
    `log_ratio` [G], log π/μ of the token or of its sequence (`trainer.ratio`), both differentiable,
    and the rest in `batch`, which has no gradient.
    """

    logprobs: "Tensor"
    log_ratio: "Tensor"
    batch: LossInputs

    @property
    def ratio(self) -> "Tensor":
        """π/μ [G], differentiable."""
        return self.log_ratio.exp()

    @property
    def advantage(self) -> "Tensor":
        """A [G]; equal for all tokens of a sequence."""
        return self.batch.advantage


Surrogate = Callable[[SurrogateInputs, LossSettings], "tuple[Tensor, Tensor]"]
"""Returns the loss [G] of each token, differentiable, and whether [G] its ratio was truncated,
clipped or masked. It must be pure and treat each sequence alone, so that the losses of
micro-batches add up; `check_surrogate` tries that.
"""
