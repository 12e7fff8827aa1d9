"""An engine without a model: drawn lengths, pseudo-random tokens, and a `Roofline`'s step times
(docs/explanation/paced-engine.md).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import (
    Emission,
    EngineStats,
    GenerationRequest,
    UpdateMode,
    WeightUpdate,
)
from rollstream.producers.engines.paced.batch import PacedBatch, PacedSequence
from rollstream.producers.engines.paced.lengths import LengthSampler
from rollstream.producers.engines.queue import QueuedEngine
from rollstream.producers.engines.roofline import Roofline
from rollstream.producers.engines.torch.weights import ServedWeights, WeightView
from rollstream.storage.weights.tensors import untie
from rollstream.streams.values import Floats, Tokens, Version


class EngineClock(Protocol):
    """Its seconds may pass faster than those of the caller's clock."""

    @property
    def scale(self) -> float:
        """Accelerator seconds in one second of the caller's clock."""
        ...

    def now(self) -> float:
        """Returns the accelerator seconds since an arbitrary start."""
        ...

    def wait_until(self, at_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class ScaledClock:
    scale: float = 1.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def now(self) -> float:
        return self.clock() * self.scale

    def wait_until(self, at_s: float) -> None:
        while (rest := at_s - self.now()) > 0:
            self.sleep(rest / self.scale)


CATCH_UP_S_MAX = 1.0
"""Caller's seconds of steps that `poll` makes up; after a longer pause the process was stopped, and
a real engine would not have decoded either.
"""


class PacedEngine(QueuedEngine[PacedSequence]):
    """`tensors` are the weights of `version`, under any names and of any shapes; they are
    copied.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: Version,
        pace: EngineClock,
        *,
        slots: int,
        context_max: int,
        kv_capacity: int,
        vocabulary: int,
        roofline: Roofline,
        lengths: LengthSampler,
        emit_every: int = 256,
    ) -> None:
        assert min(slots, emit_every) >= 1, "one slot, and one token per emission"
        assert context_max >= 2, "a prompt token and a generated one"
        if kv_capacity < context_max:
            raise EngineRefused(
                f"a KV capacity of {kv_capacity} tokens cannot hold one sequence of "
                f"{context_max} (paced.kv_tokens, rollouts.context_max)"
            )
        super().__init__(version, slots, context_max, vocabulary)
        self._roofline, self._lengths = roofline, lengths
        self._emit_every, self._pace = emit_every, pace
        self._weights = _served(tensors, version)
        self._batch = PacedBatch(kv_capacity)
        # When the newest step ended, on the engine's clock.
        self._at_s = pace.now()

    @property
    def preempted(self) -> int:
        return self._batch.preempted

    @property
    def _rows(self) -> list[PacedSequence]:
        return self._batch.rows

    def poll(self, deadline_s: float) -> list[Emission]:
        """Returns emissions as `Engine.poll`; waits for one step at least, even beyond the
        deadline.
        """
        end_s = self._pace.now() + deadline_s * self._pace.scale
        late = CATCH_UP_S_MAX * self._pace.scale
        # Steps that would have ended while the caller was busy are made up: an accelerator would
        # have continued.
        self._at_s = max(self._at_s, self._pace.now() - late)
        while self._serving and not (self._outbox and self._at_s >= self._pace.now()):
            self._admit()
            if not self._rows or not self._step(end_s):
                break
        return self._sent()

    def stats(self) -> EngineStats:
        """Returns the statistics; `busy_s` is in seconds of the caller's clock."""
        return replace(super().stats(), busy_s=self._busy_s / self._pace.scale)

    @torch.inference_mode()
    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        return super().prepare(update)

    @torch.inference_mode()
    def _load(self, update: WeightUpdate, mode: UpdateMode) -> None:
        super()._load(update, mode)
        self._at_s = self._pace.now()  # no step ran during the load
        if mode == "in_flight_recompute":
            self._evict_all()
            self._prefill(self._batch.used)

    def _open(self, request: GenerationRequest) -> PacedSequence:
        if len(set(request.sampling.stop)) >= self.vocabulary:
            raise EngineRefused(
                f"trajectory {request.trajectory!r}: sampling.stop leaves no token that continues"
            )
        return PacedSequence(request, self.context_max, self.vocabulary, self._lengths)

    def _admit(self) -> None:
        if not self._rows:  # the engine was idle until now
            self._at_s = max(self._at_s, self._pace.now())
        super()._admit()
        while self._batch.is_short() and self._evict_one():
            pass
        self._waiting.extendleft(self._batch.make_room())

    def _enter(self, sequence: PacedSequence) -> bool:
        missing = self._batch.enter(sequence)
        self._prefill(missing or 0)
        return missing is not None

    def _prefill(self, tokens: int) -> None:
        seconds = self._roofline.prefill_s(tokens)
        self._at_s += seconds
        self._busy_s += seconds

    def _step(self, end_s: float) -> bool:
        batch, now, can_wait = self._batch, self._pace.now(), not self._outbox
        # Only the steps up to the next event, whose times are known.
        steps, rows = batch.steps_max(self._emit_every), len(batch.rows)
        ends = self._at_s + self._roofline.ends_s(rows, batch.used, steps)
        if ends[0] > now and not can_wait:
            return False
        if ends[-1] > now and can_wait:
            # Wait for one step at least.
            last = max(float(ends[0]), min(float(ends[-1]), end_s))
            self._pace.wait_until(last)
            now = max(last, self._pace.now())
        done = int(np.searchsorted(ends, now, "right"))
        self._busy_s += float(ends[done - 1]) - self._at_s
        self._at_s = float(ends[done - 1])
        self._steps += done
        self._tokens += done * rows
        batch.gain(done)
        for sequence in list(batch.rows):
            if sequence.finish is not None:
                self._end_turn(sequence, sequence.finish)
            elif sequence.pending >= self._emit_every:
                self._emit(sequence)
        return self._pace.now() < end_s or bool(self._outbox)

    def _collect(self, sequence: PacedSequence) -> tuple[Tokens, Floats, None]:
        return *sequence.take(), None

    def _park(self, sequence: PacedSequence) -> None:
        self._batch.rows.remove(sequence)

    def _evict(self, sequence: PacedSequence) -> None:
        self._batch.drop_cache(sequence)

    def _release(self, sequence: PacedSequence) -> None:
        if sequence in self._batch.rows:
            self._batch.rows.remove(sequence)
        self._batch.drop_cache(sequence)

    def _kv(self) -> tuple[int, int]:
        return sum(row.cached for row in self._batch.rows), self._batch.capacity


def _served(tensors: Mapping[str, torch.Tensor], version: Version) -> ServedWeights:
    untied, tied = untie(tensors)
    places = {
        name: (WeightView(tensor.detach().clone().contiguous()),) for name, tensor in untied.items()
    }
    others: dict[str, tuple[str, ...]] = {}
    for name, owner in tied.items():
        others[owner] = (*others.get(owner, ()), name)
    shapes = {name: tuple(tensor.shape) for name, tensor in untied.items()}
    return ServedWeights(places, shapes, others, held=version)
