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

    from rollstream.consumers.trainer.learn.other_policies import PastVersions


class Learner(Protocol):
    """Trains micro-batches and updates the weights. All methods are called from one thread.

    For each update the loop calls `submit` for every micro-batch and then `finish_update`. A step
    is one or more updates (`trainer.updates_per_step`); after its last one the loop takes a
    `snapshot` to publish and, where a checkpoint is due, the `state`.
    """

    micro_batches: int
    """Number of micro-batches submitted in the present step or, between two steps, in the last
    one.
    """

    @property
    def updates(self) -> int:
        """Number of updates that made the present weights, skipped ones included."""
        ...

    @property
    def version(self) -> int:
        """Number of the version from which the present step trains; each step makes the next."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds of forward and backward passes since the learner was opened."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of the state that `state_hash` covers: weights and optimiser state."""
        ...

    def submit(self, samples: Sequence[Sample], shortages: int = 0) -> None:
        """Submit one micro-batch of the present update; it may be computed later. If computing
        fails, this or a later call of `submit`, `settle` or `finish_update` raises `ComputeFailed`,
        which names the micro-batches by their numbers within the step. The learner cannot be used
        afterwards.

        `shortages` is how often memory ran out on this micro-batch in earlier terms, by the ledger.
        Only a learner that shares its model with other processes needs it: one process divides a
        micro-batch when its memory runs out.
        """
        ...

    def settle(self) -> None:
        """Wait until the submitted micro-batches are computed. A sharded learner trains a round
        when it has a micro-batch for each process; those of an incomplete round are not waited for.
        """
        ...

    def finish_update(self) -> dict[str, float]:
        """Wait for the update's micro-batches and change the weights; returns the update's metrics
        by name.
        """
        ...

    def snapshot(self, dtype: str, pool: BufferPool | None = None) -> Tensors:
        """Returns a copy of the weights to publish, floating-point tensors as `dtype`. The copy is
        in new memory, or in memory of `pool` if the learner can use it.
        """
        ...

    def state(self, pool: BufferPool | None = None) -> Tensors:
        """Returns everything that the next update depends on, for a checkpoint. It is a copy unless
        `lends_state` is true; `pool` as in `snapshot`.
        """
        ...

    @property
    def lends_state(self) -> bool:
        """Whether `state` may return the learner's own tensors, not a copy. Then the caller writes
        them before it calls `finish_update` again.
        """
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, bit for bit. Raises `ConfigurationError` if it is the
        state of another model.
        """
        ...

    def state_hash(self) -> str:
        """Returns the xxh3-128 hash of weights and optimiser state; another number of processes
        gives another hash.
        """
        ...

    def close(self) -> None:
        """Release threads and processes; the learner cannot be used afterwards."""
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
