"""vLLM behind the engine contract (`rollstream.producers.engines.base.Engine`), without a thread of
its own. vLLM runs in this process, in one of its own, or on a server by URL.

A sequence is waiting here, inside vLLM, or held after a stop; this file moves sequences between
these states and emits their tokens. vLLM never has more sequences than free slots, so it admits
each at once unless its KV cache is full. All tokens are emitted before the version changes, and at
the end of a trajectory vLLM's own version stamps must equal those of the emissions (invariant 3).

Drafts are made beside the model (`proposer.py`). A core in this process drafts from the rollout's
own history, one in a process of its own from the node's history, which it maps by name; the
statistics that the workers write are read here.
"""

import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from rollstream.errors import EngineRefused
from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.node import CombinedSource
from rollstream.producers.drafts.source import DraftSource
from rollstream.producers.engines.base import (
    DraftStats,
    Emission,
    EngineOptions,
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
from rollstream.producers.engines.vllm.core import LocalCore, open_core
from rollstream.producers.engines.vllm.environment import has_gpu, require_vllm, shape_for
from rollstream.producers.engines.vllm.parameter_map import expected_tensors
from rollstream.producers.engines.vllm.proposer_speculation import StayDrafts, open_draft_counters
from rollstream.producers.engines.vllm.protocol import (
    CoreRequest,
    CoreWeights,
    EngineCore,
    StepOutput,
    check_temperature,
)
from rollstream.producers.engines.vllm.sequence import VllmSequence
from rollstream.producers.engines.vllm.weights import VllmWeights
from rollstream.producers.settings import VllmSettings
from rollstream.streams.values import Tokens, Version


class WorkerDrafts:
    """Draft statistics of one engine with at most `slots` sequences in vLLM."""

    def __init__(self, core: LocalCore, source: DraftSource, gate: DraftGate, slots: int) -> None:
        with open_draft_counters(slots) as (self._counters, path):
            core.draft_from(worker_source(core, source), gate.rule.kind, gate.forced, path)

    def stats(self) -> DraftStats:
        return self._counters.stats()

    def open_stay(self, stay: int, others: Iterable[StayDrafts | None]) -> StayDrafts:
        """Counters for a new stay, at a place that none of the `others` uses."""
        taken = {other.place for other in others if other is not None}
        place = next(place for place in count() if place not in taken)
        return StayDrafts(self._counters, place, stay)


def open_drafts(
    core: EngineCore, source: DraftSource | None, gate: DraftGate, slots: int
) -> WorkerDrafts | None:
    """Turn drafting on; None without a source. Raises `EngineRefused` where vLLM cannot read the
    history.
    """
    if source is None:
        return None
    if not isinstance(core, LocalCore):
        raise EngineRefused(
            "drafts: a vLLM server by URL drafts as it was started; rollouts.drafts must be "
            "'off' with rollouts.vllm.url"
        )
    return WorkerDrafts(core, source, gate, slots)


def worker_source(core: LocalCore, source: DraftSource) -> DraftSource | str:
    """The source itself, or the path at which another process maps it."""
    if not core.has_process:
        return source
    node = source.node if isinstance(source, CombinedSource) else source
    path = getattr(node, "path", None)
    if path is None:
        raise EngineRefused(
            "drafts: vLLM's core is another process, which can read the node's history only, not "
            "the rollout's own (rollouts.vllm.process = false drafts from that)"
        )
    return str(Path(path).absolute())


def open_core_and_weights(
    config: PreTrainedConfig,
    options: EngineOptions,
    settings: VllmSettings,
    drafts: int = 0,
) -> tuple[EngineCore, CoreWeights]:
    """Open the core of an engine, with dummy weights until weights are loaded, and its weights. At
    most `drafts` tokens of a sequence are drafted per step. Raises `ConfigurationError` or
    `EngineRefused`, which names the missing part.
    """
    if settings.url is not None:
        from rollstream.producers.engines.vllm.remote.factory import open_remote  # only for a URL

        return open_remote(config, options.slots, options.context_max, settings)
    require_vllm()
    device = options.device or ("cuda" if has_gpu() else "cpu")
    needed = expected_tensors(config)
    sizes = options.slots, options.context_max
    core = open_core(config, shape_for(config, *sizes, device, settings, drafts))
    return core, VllmWeights(core, needed, in_place=device != "cpu")


class VllmEngine:
    """Continuous batching by vLLM of one model.

    `tensors` are the weights of `version` under their checkpoint names, of any floating dtype. With
    `settings.process` vLLM computes in a process of its own, also between calls; without, only
    inside `poll`. A core in another process must be able to map the draft source by name
    (`drafts.py`).
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        tensors: Mapping[str, torch.Tensor],
        version: Version,
        options: EngineOptions,
        *,
        settings: VllmSettings | None = None,
    ) -> None:
        self.version = version
        self.slots, self.context_max = options.slots, options.context_max
        self._emit_every = options.emit_every
        self.vocabulary = int(model_config.vocab_size)
        gate = options.gate or DraftGate()
        longest = 0 if options.drafts is None else gate.rule.most
        self._core, self._weights = open_core_and_weights(
            model_config, options, settings or VllmSettings(), longest
        )
        weakref.finalize(self, self._core.release).atexit = False
        self._drafting = open_drafts(self._core, options.drafts, gate, self.slots)
        self._known: dict[str, VllmSequence] = {}
        self._waiting: deque[VllmSequence] = deque()
        self._inside: dict[str, VllmSequence] = {}  # by key
        self._held: dict[str, VllmSequence] = {}
        self._outbox: list[Emission] = []
        self._serving = True
        self._stays = self._steps = self._tokens = 0
        self._busy_s = 0.0
        self._weights.load(self._weights.prepare(WeightUpdate(version, tensors)))
        self._core.resume()

    def submit(self, request: GenerationRequest) -> None:
        check_request(request, self._known, self.vocabulary)
        check_room(request, self.context_max)
        check_temperature(request.sampling.temperature)
        sequence = VllmSequence(request, self.context_max)
        self._known[request.trajectory] = sequence
        self._waiting.append(sequence)

    def poll(self, deadline_s: float) -> list[Emission]:
        end, began = time.monotonic() + deadline_s, time.thread_time()
        while self._serving and not self._outbox:
            self._admit()
            if not self._inside:
                break
            self._step(end - time.monotonic())
            if time.monotonic() >= end:
                break
        self._busy_s += time.thread_time() - began
        if not self._serving:
            return []
        emissions, self._outbox = self._outbox, []
        return emissions

    def append(self, trajectory: str, tokens: Tokens) -> None:
        sequence = self._held.get(trajectory)
        if sequence is None or sequence.finish != "stop":
            raise EngineRefused(f"trajectory {trajectory!r} is not held after a stop")
        check_append(trajectory, tokens, self.vocabulary)
        sequence.append(tokens)
        del self._held[trajectory]
        self._waiting.appendleft(sequence)  # it enters next, into the slot that it kept

    def abort(self, trajectory: str) -> Emission | None:
        sequence = self._known.pop(trajectory, None)
        if sequence is None:
            return None
        if sequence.key in self._inside:
            self._leave(sequence)
            self._emit(sequence)
        elif self._held.pop(trajectory, None) is None:
            self._waiting.remove(sequence)
        return take_back(self._outbox, trajectory)

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        return self._weights.prepare(update)

    def update(self, update: WeightUpdate, mode: UpdateMode) -> None:
        """1. Emit all tokens under the old version.  2. Load the new weights.  3. Resume decoding,
        with or without the KV cache, as the mode requires.
        """
        if mode == "keep_version" and self._known and update.version != self.version:
            raise EngineRefused(
                f"keep_version: {len(self._known)} trajectories are still here; nothing was changed"
            )
        paused = self._core.pause()  # 1
        self._take(paused.outputs)
        for sequence in self._inside.values():
            self._emit(sequence)
        self._serving = False
        self._weights.load(update)  # 2
        self.version = update.version
        self._postpone(paused.dropped)
        if mode == "in_flight_recompute":  # 3
            self._core.reset_cache()
        self._core.resume()
        self._serving = True

    def read_back(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        return self._weights.compare(names, tensors)

    def running(self) -> list[str]:
        return list(self._known)

    def stats(self) -> EngineStats:
        load = self._core.load
        idle = not self._inside  # vLLM's statistics are those of its last step
        kv_used = 0 if idle else round(load.kv_share * self._core.kv_capacity)
        waiting = 0 if idle else min(load.waiting, len(self._inside))
        drafts = DraftStats()
        if self._drafting is not None:
            drafts = self._drafting.stats()
        return EngineStats(
            slots=self.slots,
            running=len(self._inside) - waiting + len(self._held),
            waiting=len(self._waiting) + waiting,
            kv_used=kv_used,
            kv_capacity=self._core.kv_capacity,
            steps=self._steps,
            tokens=self._tokens,
            busy_s=self._busy_s,
            drafts=drafts,
        )

    # ---- sequences -----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Submit waiting sequences to vLLM, in their order, while slots are free."""
        while self._waiting and len(self._inside) + len(self._held) < self.slots:
            sequence = self._waiting.popleft()
            if not sequence.room:
                sequence.finish = "length"
                del self._known[sequence.request.trajectory]
                self._outbox.append(sequence.emit(self.version))
                continue
            self._stays += 1
            sequence.enter(f"{sequence.request.trajectory}/{self._stays}")
            if self._drafting is not None:
                others = (other.stay_drafts for other in self._inside.values())
                sequence.stay_drafts = self._drafting.open_stay(self._stays, others)
            self._inside[sequence.key] = sequence
            self._core.add(
                CoreRequest(
                    key=sequence.key,
                    tokens=list(sequence.tokens),
                    sampling=sequence.request.sampling,
                    room=sequence.room,
                    seed=sequence.seed,
                    salt=f"{self.version}/{self._core.loads}",
                    prompt=sequence.prompt,
                    group=sequence.request.group,
                    place=0 if sequence.stay_drafts is None else sequence.stay_drafts.place,
                    stay=self._stays,
                )
            )

    def _step(self, wait_s: float) -> None:
        outputs = self._core.step(max(0.0, wait_s))
        self._steps += bool(outputs)
        self._take(outputs)

    def _take(self, outputs: Iterable[StepOutput]) -> None:
        for output in outputs:
            sequence = self._inside.get(output.key)
            if sequence is not None:
                self._gain(sequence, output)

    def _gain(self, sequence: VllmSequence, output: StepOutput) -> None:
        self._tokens += len(output.tokens)
        sequence.gain(output.tokens, output.logprobs, output.finish is not None)
        if output.finish is None:
            if len(sequence.pending) >= self._emit_every:
                self._emit(sequence)
            return
        if output.finish not in ("stop", "length"):
            raise EngineRefused(f"{output.key}: vLLM ended the request by {output.finish!r}")
        self._check_stamps(sequence, output)
        sequence.finish = "stop" if output.finish == "stop" else "length"
        del self._inside[sequence.key]
        self._emit(sequence)
        if sequence.request.hold and sequence.finish == "stop":
            self._held[sequence.request.trajectory] = sequence
        else:
            del self._known[sequence.request.trajectory]

    def _check_stamps(self, sequence: VllmSequence, output: StepOutput) -> None:
        """Raise `EngineRefused` unless vLLM's stamps of this stay equal the emitted versions."""
        emitted = sequence.stamps(self.version)
        if output.versions != emitted:
            raise EngineRefused(
                f"{output.key}: vLLM stamped its tokens {output.versions}, "
                f"but they were emitted as {emitted}"
            )

    def _leave(self, sequence: VllmSequence) -> None:
        del self._inside[sequence.key]
        self._core.drop([sequence.key])

    def _postpone(self, dropped: frozenset[str]) -> None:
        """Queue the sequences again that vLLM has not started, or has dropped: their prompts must
        not be taken from a cache of other weights.
        """
        inside = self._inside.values()
        idle = [
            sequence for sequence in inside if not sequence.stay_tokens or sequence.key in dropped
        ]
        for sequence in reversed(idle):
            self._leave(sequence)
            self._waiting.appendleft(sequence)

    def _emit(self, sequence: VllmSequence) -> None:
        if sequence.pending or sequence.finish is not None:
            self._outbox.append(sequence.emit(self.version))
