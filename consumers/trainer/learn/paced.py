"""A learner that only takes time (`trainer.learner = "paced"`; docs/explanation/paced-engine.md).

Each update flips the last bit of a share of the elements of every tensor, chosen by (seed, update)
alone: a repeated step produces the same bits, and deltas are as small as those of real training in
bf16 (PULSE, arXiv 2602.03839). No loss is reported.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.base import LearnableModel
from rollstream.consumers.trainer.learn.workers import BufferPool
from rollstream.errors import ConfigurationError
from rollstream.storage.weights.tensors import state_hash

COLUMNS = 4096
ROWS_MAX = 4096  # a full tensor of 4096 × 4096 elements has 32 MiB in bf16
PREFIX, COUNTER = "weights.", "updates"  # names in a checkpoint: a tensor's prefix, the counter


@dataclass(frozen=True, slots=True)
class PacedModel(LearnableModel):
    """A step lasts `step_s` plus `token_s` for each of its tokens, in seconds of wall time."""

    seed: int
    weights_bytes: int
    changed_share: float
    step_s: float
    token_s: float

    def open_learner(self, settings: TrainerSettings) -> "PacedLearner":
        return PacedLearner(self, settings)


class PacedLearner:
    """`submit` adds a micro-batch's time to a queue of modelled work, and `finish_update` sleeps
    until that would have ended.
    """

    def __init__(
        self,
        model: PacedModel,
        settings: TrainerSettings,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model, self._settings = model, settings
        self._clock, self._sleep = clock, sleep
        self._weights = make_weights(model)
        self._until_s = 0.0
        """When everything submitted would end."""
        self._tokens = self._masked = self._sequences = 0
        self._begins_step = True
        self.updates = 0
        self.busy_s = 0.0
        self.micro_batches = 0

    @property
    def version(self) -> int:
        return self.updates // self._settings.updates_in_step

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights.values())

    def submit(self, samples: Sequence[Sample], shortages: int = 0) -> None:
        if self._begins_step:
            self.micro_batches, self._begins_step = 0, False
        self.micro_batches += 1
        self._sequences += len(samples)
        self._tokens += sum(int(np.count_nonzero(sample.mask)) for sample in samples)
        self._masked += sum(int(np.count_nonzero(~sample.mask)) for sample in samples)
        self._spend(self._model.token_s * sum(len(sample.tokens) for sample in samples))

    def settle(self) -> None:
        """Returns at once: nothing is computed."""

    def finish_update(self) -> dict[str, float]:
        self._spend(self._model.step_s / self._settings.updates_in_step)
        self.updates += 1
        change_weights(self._weights, self._model, self.updates)
        if (rest := self._until_s - self._clock()) > 0:
            self._sleep(rest)
        metrics = {
            "tokens": float(self._tokens),
            "sequences": float(self._sequences),
            "masked_tokens": float(self._masked),
        }
        self._tokens = self._masked = self._sequences = 0
        self._begins_step = self.updates % self._settings.updates_in_step == 0
        return metrics

    def snapshot(self, dtype: str, pool: BufferPool | None = None) -> dict[str, Tensor]:
        return (pool or BufferPool(1)).copy(self._weights, getattr(torch, dtype))

    def state(self, pool: BufferPool | None = None) -> dict[str, Tensor]:
        return (pool or BufferPool(1)).copy(self._state(), None)

    lends_state = False

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        mine = self._state()
        for name, tensor in mine.items():
            stored = tensors.get(name)
            if stored is None or stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                raise ConfigurationError(
                    f"checkpoint: {name!r} is missing or of another shape: these tensors belong to "
                    "another configuration (trainer.learner, paced.weights_bytes)"
                )
        for name, tensor in self._weights.items():
            tensor.copy_(tensors[PREFIX + name])
        self.updates = int(tensors[COUNTER])

    def state_hash(self) -> str:
        return state_hash(self._state())

    def close(self) -> None:
        """Does nothing: there are no threads or processes to release."""

    def _spend(self, seconds: float) -> None:
        # Modelled work begins when earlier work ends, and passes during this process's real work,
        # as on an accelerator.
        self._until_s = max(self._until_s, self._clock()) + seconds
        self.busy_s += seconds

    def _state(self) -> dict[str, Tensor]:
        tensors = {PREFIX + name: tensor for name, tensor in self._weights.items()}
        return {**tensors, COUNTER: torch.tensor(self.updates)}


def make_weights(model: PacedModel) -> dict[str, Tensor]:
    """Returns bf16 tensors of the configured total size, from N(0, 0.02²) by the model's seed."""
    elements, weights = max(1, model.weights_bytes // 2), dict[str, Tensor]()
    while elements:
        rows = min(ROWS_MAX, elements // COLUMNS)
        shape = (rows, COLUMNS) if rows else (elements,)
        drawn = torch.Generator().manual_seed(_seed(model.seed, 0, len(weights)))
        tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=drawn)
        weights[f"layers.{len(weights):03d}.weight"] = tensor
        elements -= tensor.numel()
    return weights


def change_weights(weights: Mapping[str, Tensor], model: PacedModel, update: int) -> None:
    """Flips the last bit of one element, drawn by (seed, update), in every `1 / changed_share`
    successive ones.
    """
    stride = max(1, round(1 / model.changed_share))
    for index, tensor in enumerate(weights.values()):
        flat = tensor.view(-1).view(torch.int16).numpy()
        drawn = np.random.default_rng(_seed(model.seed, update, index))
        begins = np.arange(0, len(flat), stride)
        at = begins + drawn.integers(0, stride, len(begins))
        flat[at[at < len(flat)]] ^= 1


def _seed(seed: int, update: int, tensor: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}/{update}/{tensor}".encode()) >> 1
