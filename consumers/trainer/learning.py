"""What a trainer asks of whatever learns: the learner proper (`learner.py`), several processes that
learn as one (`sharded/`), or one that only keeps time (`paced_learner.py`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from consumers.settings import TrainerSettings
from consumers.trainer.compute_failure import ComputeFailed
from consumers.trainer.copies import Copies
from consumers.trainer.learner import Learner
from consumers.trainer.paced_learner import PacedLearner, PacedModel
from consumers.trainer.sample import Sample
from storage.spread import Tensors

if TYPE_CHECKING:  # its collectives are for several processes only
    from consumers.trainer.sharded.learner import ShardedModel

__all__ = ["ComputeFailed", "Learning", "open_learner"]


class Learning(Protocol):
    """One thread calls it."""

    micro_batches: int
    """Micro-batches of the step being trained, or just trained."""

    @property
    def updates(self) -> int:
        """Updates behind the weights, skipped ones included."""
        ...

    @property
    def version(self) -> int:
        """Number of the version that is trained from."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds of forward and backward passes since the start."""
        ...

    def submit(self, samples: Sequence[Sample]) -> None:
        """One micro-batch of the update. `ComputeFailed` here, in `settle` or in `finish_update`
        names those that raised.
        """
        ...

    def settle(self) -> None:
        """What was submitted is computed when this returns, but in several processes micro-batches
        that still wait for others to fill a round.
        """
        ...

    def finish_update(self) -> dict[str, float]:
        """Wait for the update's micro-batches, change the weights; returns metrics."""
        ...

    def snapshot(self, dtype: str, copies: Copies | None = None) -> Tensors:
        """A copy to publish; it is of `copies`, else the caller's own."""
        ...

    def state(self, copies: Copies | None = None) -> Tensors:
        """A copy of all that the next update depends on, for a checkpoint."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from `state()`, bit for bit; `ConfigurationError` when it is of another model."""
        ...

    def state_hash(self) -> str:
        """xxh3-128 over the state."""
        ...

    def close(self) -> None:
        """It is of no use afterwards."""
        ...


def open_learner(
    model: "PreTrainedModel | PacedModel | ShardedModel", settings: TrainerSettings
) -> Learning:
    """What learns this model; a real one is taken over."""
    if isinstance(model, PacedModel):
        return PacedLearner(model, settings)
    if isinstance(model, PreTrainedModel):
        return Learner(model, settings)
    from consumers.trainer.sharded.learner import ShardedLearner

    return ShardedLearner(model, settings)
