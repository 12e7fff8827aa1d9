"""Defines the interface between the trainer's loop and a learner, the part that holds the model,
computes gradients and updates the weights (`Learner`); `open_learner` opens the one for a model.

A `PreTrainedModel` is trained in this process by `TorchLearner` (`learner.py`). Any other model
brings its learner (`LearnableModel`): one that several processes share, or one that only takes the
time that training would take (`paced.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.workers import BufferPool
from rollstream.storage.weights.tensors import Tensors

if TYPE_CHECKING:  # a paced run needs no code that computes a model
    from transformers import PreTrainedModel

    from rollstream.consumers.trainer.learn.objective import PastVersions


class Learner(Protocol):
    """Trains micro-batches and updates the weights; to be called from one thread. For each update
    (a step has `trainer.updates_per_step`) the loop calls `submit` for every micro-batch, then
    `finish_update`; after a step `snapshot` and, where a checkpoint is due, `state`.
    """

    micro_batches: int
    """Number of micro-batches of the present step or, between two steps, of the last one."""

    @property
    def updates(self) -> int:
        """Number of updates that made the present weights, skipped ones included."""
        ...

    @property
    def version(self) -> int:
        """Number of the version that the present step trains from."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds of forward and backward passes since the start."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of weights and optimiser state, as `state_hash` covers them."""
        ...

    def submit(self, samples: Sequence[Sample], shortages: int = 0) -> None:
        """Submits one micro-batch of the present update; it may be computed later. If computing
        fails, this or a later call raises `ComputeFailed` with the micro-batches' numbers within
        the step, and the learner cannot be used afterwards.

        `shortages` is how often memory ran out on it in earlier terms, for a learner that shares
        its model; one process divides a micro-batch at once.
        """
        ...

    def settle(self) -> None:
        """Waits until the submitted micro-batches are computed; a sharded learner does not wait for
        those of an incomplete round.
        """
        ...

    def finish_update(self) -> dict[str, float]:
        """Waits for the update's micro-batches and changes the weights; returns the update's
        metrics.
        """
        ...

    def snapshot(self, dtype: str, pool: BufferPool | None = None) -> Tensors:
        """Returns a copy of the weights to publish, floating-point tensors as `dtype`, in memory of
        `pool` if the learner can use it.
        """
        ...

    def state(self, pool: BufferPool | None = None) -> Tensors:
        """Returns everything that the next update depends on, for a checkpoint; a copy unless
        `lends_state`. `pool` as in `snapshot`.
        """
        ...

    @property
    def lends_state(self) -> bool:
        """Whether `state` may return the learner's own tensors, which must be written before the
        next `finish_update`.
        """
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores `state` bit for bit. Raises `ConfigurationError` for another model's state."""
        ...

    def state_hash(self) -> str:
        """Returns the xxh3-128 hash of weights and optimiser state; it depends on the number of
        processes.
        """
        ...

    def close(self) -> None:
        """Releases threads and processes; the learner cannot be used afterwards."""
        ...


class LearnableModel(ABC):
    """A model that brings its learner."""

    @abstractmethod
    def open_learner(self, settings: TrainerSettings) -> Learner:
        """Returns the learner, to which the model belongs afterwards."""


def open_learner(
    model: "PreTrainedModel | LearnableModel",
    settings: TrainerSettings,
    past: "PastVersions | None" = None,
) -> Learner:
    """Returns the learner for this model. Afterwards a `PreTrainedModel` belongs to the learner:
    nothing else may use it. `past` gives the versions of the run that its loss needs.
    """
    if isinstance(model, LearnableModel):
        return model.open_learner(settings)
    # Imported here: a learner of another model needs no code that computes this one.
    from rollstream.consumers.trainer.learn.learner import TorchLearner

    return TorchLearner(model, settings, past)
