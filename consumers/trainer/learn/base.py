"""Defines the interface between the trainer's loop and a learner, and opens the learner that fits a
model.

Learners: one process that trains a model (`learner.py`), several processes that share one model
(`sharded/`), and a learner that only models time (`paced.py`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.paced import PacedLearner, PacedModel
from rollstream.consumers.trainer.learn.workers import BufferPool
from rollstream.storage.weights.tensors import Tensors

if TYPE_CHECKING:  # torch.distributed is loaded for several processes only
    from rollstream.consumers.trainer.sharded.learner import ShardedModel


class Learner(Protocol):
    """Trains micro-batches and updates the weights; to be called from one thread."""

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
        """Seconds spent in forward and backward passes since the start."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of the state that `state_hash` covers."""
        ...

    def submit(self, samples: Sequence[Sample]) -> None:
        """Submit one micro-batch of the update. A failure raises `ComputeFailed`, which names the
        micro-batches, here, in `settle` or in `finish_update`.
        """
        ...

    def settle(self) -> None:
        """Wait until the submitted micro-batches are computed, except those that a sharded learner
        still holds until a round is full.
        """
        ...

    def finish_update(self) -> dict[str, float]:
        """Wait for the update's micro-batches and change the weights; returns metrics."""
        ...

    def snapshot(self, dtype: str, pool: BufferPool | None = None) -> Tensors:
        """Returns a copy of the weights to publish, in memory of `pool` if given, else in new
        memory.
        """
        ...

    def state(self, pool: BufferPool | None = None) -> Tensors:
        """Returns everything that the next update depends on, for a checkpoint: a copy, or the
        state itself where `lends_state`.
        """
        ...

    @property
    def lends_state(self) -> bool:
        """Whether `state` returns the state itself: it must be written before the next update."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state()`, bit for bit; raises `ConfigurationError` if it is of another model."""
        ...

    def state_hash(self) -> str:
        """Returns xxh3-128 over the state."""
        ...

    def close(self) -> None:
        """Release threads and processes; the learner cannot be used afterwards."""
        ...


def open_learner(
    model: "PreTrainedModel | PacedModel | ShardedModel", settings: TrainerSettings
) -> Learner:
    """Returns the learner for this kind of model; a `PreTrainedModel` belongs to the learner
    afterwards.
    """
    if isinstance(model, PacedModel):
        return PacedLearner(model, settings)
    if isinstance(model, PreTrainedModel):
        return TorchLearner(model, settings)
    from rollstream.consumers.trainer.sharded.learner import ShardedLearner

    return ShardedLearner(model, settings)
