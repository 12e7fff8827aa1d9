"""The interface between the trainer's loop and what computes gradients and updates (`Learner`). A
`PreTrainedModel` is trained in this process by `TorchLearner`; any other model brings its learner
(`LearnableModel`).
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
    """Trains micro-batches; to be called from one thread. For each update (a step has
    `trainer.updates_per_step`) the loop calls `submit` for every micro-batch, then `finish_update`;
    after a step `snapshot` and, where a checkpoint is due, `state`.
    """

    micro_batches: int
    """Of the present step or, between two, of the last one."""

    @property
    def updates(self) -> int:
        """Updates that made the present weights, skipped ones included."""
        ...

    @property
    def version(self) -> int: ...

    @property
    def busy_s(self) -> float:
        """Returns the seconds of forward and backward passes since the start."""
        ...

    @property
    def state_bytes(self) -> int: ...

    def submit(self, samples: Sequence[Sample], shortages: int = 0) -> None:
        """The micro-batch may be computed later. If that fails, this or a later call raises
        `ComputeFailed` with numbers within the step, and the learner cannot be used afterwards.

        `shortages` is how often memory ran out on it in earlier terms, for a learner that shares
        its model; one process divides a micro-batch at once.
        """
        ...

    def settle(self) -> None:
        """Waits for the submitted micro-batches, in a sharded learner not for an
        incomplete round.
        """
        ...

    def finish_update(self) -> dict[str, float]:
        """Waits for the update's micro-batches and changes the weights; returns metrics."""
        ...

    def snapshot(self, dtype: str, pool: BufferPool | None = None) -> Tensors:
        """A copy of the weights to publish, floating-point tensors as `dtype`, in memory of `pool`
        if the learner can use it.
        """
        ...

    def state(self, pool: BufferPool | None = None) -> Tensors:
        """All that the next update depends on; a copy unless `lends_state`."""
        ...

    @property
    def lends_state(self) -> bool:
        """`state` may return the learner's own tensors, to be written before the next
        `finish_update`.
        """
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores bit for bit. Raises `ConfigurationError` for another model's state."""
        ...

    def state_hash(self) -> str:
        """Returns xxh3-128 of weights and optimiser state; depends on the number of processes."""
        ...

    def close(self) -> None: ...


class LearnableModel(ABC):
    @abstractmethod
    def open_learner(self, settings: TrainerSettings) -> Learner:
        """The model belongs to the learner afterwards."""


def open_learner(
    model: "PreTrainedModel | LearnableModel",
    settings: TrainerSettings,
    past: "PastVersions | None" = None,
) -> Learner:
    """Afterwards a `PreTrainedModel` belongs to the learner: nothing else may use it. `past` gives
    the versions that its loss needs.
    """
    if isinstance(model, LearnableModel):
        return model.open_learner(settings)
    # Imported here: a learner of another model needs no code that computes this one.
    from rollstream.consumers.trainer.learn.learner import TorchLearner

    return TorchLearner(model, settings, past)
