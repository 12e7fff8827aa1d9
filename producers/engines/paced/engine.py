"""The engine contract without a model: lengths are drawn, tokens follow from their positions, and
steps last as long as a roofline of batch and KV gives.

Weights are served, patched and compared as in a real engine, though nothing is computed with them.
Between two events (a turn ends, tokens are due, the cache is full) all step times are known
beforehand, so the engine sleeps until the next event: its processor time does not depend on how
long steps are. Steps continue while the caller is busy, as they do on an accelerator. The engine's
clock counts seconds of the simulated accelerator, which may pass faster than wall-clock seconds.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import (
    Emission,
    EngineStats,
    GenerationRequest,
    UpdateMode,
    WeightComparison,
    WeightUpdate,
    check_append,
    check_request,
    check_room,
    take_back,
)
from rollstream.producers.engines.paced.batch import PacedBatch, PacedSequence
from rollstream.producers.engines.paced.lengths import LengthSampler
from rollstream.producers.engines.roofline import Roofline, batch_max
from rollstream.producers.engines.torch.weight_views import WeightView
from rollstream.producers.engines.torch.weights import PreparedWrites, ServedWeights
from rollstream.storage.weights.tensors import untie
from rollstream.streams.values import Tokens, Version


class EngineClock(Protocol):
    @property
    def scale(self) -> float:
        """Accelerator seconds in one second of the caller's clock."""
        ...

    def now(self) -> float:
        """Accelerator seconds since an arbitrary start."""
        ...

    def wait_until(self, at_s: float) -> None:
        """Sleep until `now` is at least `at_s`."""
        ...


@dataclass(frozen=True, slots=True)
class ScaledClock:
    """Real time, `scale` times as fast."""

    scale: float = 1.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def now(self) -> float:
        return self.clock() * self.scale

    def wait_until(self, at_s: float) -> None:
        while (rest := at_s - self.now()) > 0:
            self.sleep(rest / self.scale)


CATCH_UP_S_MAX = 1.0
"""Most seconds of the caller's time between two polls for which steps are made up afterwards: a
process that was stopped did not decode meanwhile.
"""


@dataclass(frozen=True, slots=True)
class PacedShape:
    """Capacity and speed of the engine: rows, context, KV capacity, roofline, lengths."""

    slots: int
    context_max: int
    kv_capacity: int
    vocabulary: int
    roofline: Roofline
    lengths: LengthSampler
    emit_every: int = 256


class PacedEngine:
    """Implements `Engine`. `tensors` are the weights of `version`, with any names and shapes; they
    are copied.
    """

    def __init__(
        self,
        shape: PacedShape,
        tensors: Mapping[str, torch.Tensor],
        version: Version,
        pace: EngineClock,
    ) -> None:
        assert min(shape.slots, shape.emit_every) >= 1, "one slot, and one token per emission"
        assert shape.context_max >= 2, "a prompt token and a generated one"
        if shape.kv_capacity < shape.context_max:
            raise EngineRefused(
                f"a KV capacity of {shape.kv_capacity} tokens cannot hold one sequence of "
                f"{shape.context_max} (paced.kv_tokens, rollouts.context_max)"
            )
        self.version = version
        self._shape, self._pace = shape, pace
        self._served = _served(tensors)
        self._batch = PacedBatch(shape.slots, shape.kv_capacity)
        self._known: dict[str, PacedSequence] = {}
        self._outbox: list[Emission] = []
        self._serving = True
        self._held: Version | None = version
        """The version whose weights are served whole; None during an update and after a failed
        one.
        """
        self._at_s = pace.now()
        """When the newest step ended, on the engine's clock."""
        self._steps = self._tokens = 0
        self._busy_s = 0.0

    @property
    def batch_max(self) -> int:
        """B_max of its roofline."""
        return batch_max(self._shape.roofline, self._shape.slots)

    @property
    def preempted(self) -> int:
        """How often a sequence lost its cache because the KV capacity was full."""
        return self._batch.preempted

    def submit(self, request: GenerationRequest) -> None:
        check_request(request, self._known, self._shape.vocabulary)
        if len(set(request.sampling.stop)) >= self._shape.vocabulary:
            raise EngineRefused(
                f"trajectory {request.trajectory!r}: sampling.stop leaves no token that continues"
            )
        context_max = self._shape.context_max
        check_room(request, context_max)
        sequence = PacedSequence(request, context_max, self._shape.vocabulary, self._shape.lengths)
        self._known[request.trajectory] = sequence
        self._batch.waiting.append(sequence)

    def poll(self, deadline_s: float) -> list[Emission]:
        """As `Engine.poll`; makes at least one step, as an engine that steps inside `poll` does."""
        until = self._pace.now() + deadline_s * self._pace.scale
        late = CATCH_UP_S_MAX * self._pace.scale
        self._at_s = max(self._at_s, self._pace.now() - late)
        while self._serving and not (self._outbox and self._at_s >= self._pace.now()):
            self._enter()
            if not self._batch.rows:
                break
            if not self._step(until, can_wait=not self._outbox):
                break
        if not self._serving:
            return []
        emissions, self._outbox = self._outbox, []
        return emissions

    def append(self, trajectory: str, tokens: Tokens) -> None:
        sequence = self._known.get(trajectory)
        if sequence is None or trajectory not in self._batch.held or sequence.finish != "stop":
            raise EngineRefused(f"trajectory {trajectory!r} is not held after a stop")
        check_append(trajectory, tokens, self._shape.vocabulary)
        sequence.append(tokens)
        self._batch.resume(sequence)

    def abort(self, trajectory: str) -> Emission | None:
        sequence = self._known.pop(trajectory, None)
        if sequence is None:
            return None
        self._emit(sequence)
        self._batch.drop(sequence)
        return take_back(self._outbox, trajectory)

    @torch.inference_mode()
    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        return self._served.prepare_for(update, self._held)

    @torch.inference_mode()
    def update(self, update: WeightUpdate, mode: UpdateMode) -> None:
        if mode == "keep_version" and self._known and update.version != self.version:
            raise EngineRefused(
                f"keep_version: {len(self._known)} trajectories are still here; nothing was changed"
            )
        for sequence in self._batch.all_sequences():
            self._emit(sequence)
        self._serving = False
        if not isinstance(update.prepared, PreparedWrites):
            update = self.prepare(update)
        held, self._held = self._held, None
        self._served.apply(update, held)
        self._held = self.version = update.version
        self._at_s = self._pace.now()  # nothing was decoded meanwhile
        if mode == "in_flight_recompute":
            self._prefill(self._batch.used)
        self._serving = True

    @torch.inference_mode()
    def read_back(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        return self._served.compare(names, tensors)

    def running(self) -> list[str]:
        return list(self._known)

    def stats(self) -> EngineStats:
        """As `Engine.stats`; `busy_s` is the caller's time that prefill and decode took."""
        batch = self._batch
        return EngineStats(
            slots=self._shape.slots,
            running=len(batch.rows) + len(batch.held),
            waiting=len(batch.waiting),
            kv_used=batch.used,
            kv_capacity=self._shape.kv_capacity,
            steps=self._steps,
            tokens=self._tokens,
            busy_s=self._busy_s / self._pace.scale,
        )

    def _enter(self) -> None:
        if not self._batch.rows:  # the engine was idle until now
            self._at_s = max(self._at_s, self._pace.now())
        tokens, full = self._batch.enter()
        self._prefill(tokens)
        for sequence in full:  # ends without another token
            sequence.finish = "length"
            del self._known[sequence.trajectory]
            self._outbox.append(sequence.emit(self.version))
        self._batch.make_room()

    def _prefill(self, tokens: int) -> None:
        seconds = self._shape.roofline.prefill_s(tokens)
        self._at_s += seconds
        self._busy_s += seconds

    def _step(self, until: float, can_wait: bool) -> bool:
        """Make the steps up to the next event that have ended by now. With `can_wait`, wait for
        those that end by `until`, and in any case for the first. Returns False when the time is
        over.
        """
        batch, now = self._batch, self._pace.now()
        steps, rows = batch.steps_max(self._shape.emit_every), len(batch.rows)
        ends = self._at_s + self._shape.roofline.ends_s(rows, batch.used, steps)
        if ends[0] > now and not can_wait:
            return False
        if ends[-1] > now and can_wait:
            last = max(float(ends[0]), min(float(ends[-1]), until))
            self._pace.wait_until(last)
            now = max(last, self._pace.now())
        done = int(np.searchsorted(ends, now, "right"))
        self._busy_s += float(ends[done - 1]) - self._at_s
        self._at_s = float(ends[done - 1])
        self._steps += done
        self._tokens += done * rows
        batch.gain(done)
        self._emit_due()
        return self._pace.now() < until or bool(self._outbox)

    def _emit_due(self) -> None:
        """Emit tokens that are due, and remove the sequences whose turn is over."""
        for sequence in list(self._batch.rows):
            if sequence.finish is None and sequence.pending < self._shape.emit_every:
                continue
            self._emit(sequence)
            if sequence.finish is not None:
                hold = sequence.hold and sequence.finish == "stop"
                self._batch.end(sequence, hold)
                if not hold:
                    del self._known[sequence.trajectory]

    def _emit(self, sequence: PacedSequence) -> None:
        if sequence.pending:
            self._outbox.append(sequence.emit(self.version))


def _served(tensors: Mapping[str, torch.Tensor]) -> ServedWeights:
    """A copy of every tensor, served unchanged."""
    kept, tied = untie(tensors)
    places = {
        name: (WeightView(tensor.detach().clone().contiguous()),) for name, tensor in kept.items()
    }
    others: dict[str, tuple[str, ...]] = {}
    for name, owner in tied.items():
        others[owner] = (*others.get(owner, ()), name)
    shapes = {name: tuple(tensor.shape) for name, tensor in kept.items()}
    return ServedWeights(places, shapes, others)
