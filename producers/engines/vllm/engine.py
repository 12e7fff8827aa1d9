"""Generates through vLLM, which stamps each token with its version. At the end of a stay (the life
of one request to vLLM) these stamps must equal the versions under which the tokens were emitted
(invariant 3).
"""

import time
import weakref
from collections.abc import Iterable, Mapping, ValuesView
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
import xxhash
from transformers import PreTrainedConfig

from rollstream.errors import EngineRefused
from rollstream.producers.drafts.gate import DraftGate, measured_gate
from rollstream.producers.drafts.history import prompt_key
from rollstream.producers.drafts.node import CombinedSource
from rollstream.producers.engines.base import (
    DraftStats,
    Emission,
    EngineStats,
    GenerationRequest,
    UpdateMode,
    WeightUpdate,
)
from rollstream.producers.engines.drafting import DraftSource
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.queue import QueuedEngine, QueuedSequence
from rollstream.producers.engines.randomness import trajectory_key
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.adapters import VllmAdapters, open_core_and_weights
from rollstream.producers.engines.vllm.local.core import LocalCore
from rollstream.producers.engines.vllm.local.proposer_speculation import (
    StayDrafts,
    open_draft_counters,
)
from rollstream.producers.engines.vllm.local.protocol import (
    CoreRequest,
    EngineCore,
    StepOutput,
    check_temperature,
)
from rollstream.streams.values import Drafts, Floats, Tokens, Version


class VllmSequence(QueuedSequence):
    """The present stay, the life of one request to vLLM; `key` is its request id, "" before the
    first.
    """

    def __init__(self, request: GenerationRequest, context_max: int) -> None:
        super().__init__(request, context_max)
        self.tokens: list[int] = request.tokens.tolist()
        self.key = ""
        self.stay_tokens = 0
        self.stay_drafts: StayDrafts | None = None
        self.emitted_versions: list[tuple[str, int]] = []
        """Versions of the stay's tokens, each with the index of its first token."""
        # Generated tokens that were not emitted yet, with their log-probabilities.
        self.pending: list[int] = []
        self.logprobs: list[float] = []

    @property
    def prompt(self) -> int:
        return prompt_key(self.request.tokens, self.request.sources)

    @property
    def seed(self) -> int:
        key = trajectory_key(self.request.seed, self.request.noise_name)
        # vLLM's random sequence restarts with every stay and must not repeat the numbers of an
        # earlier one.
        so_far = np.array(self.tokens, np.uint32).tobytes()
        return xxhash.xxh3_64_intdigest(so_far, seed=key) >> 1  # fits int64

    def gain(self, tokens: list[int], logprobs: list[float], ended: bool = False) -> None:
        """Add the tokens of one decode step; `ended` marks the last step of the stay."""
        if self.stay_drafts is not None and tokens:
            self.stay_drafts.gained(len(tokens), ended)
        self.tokens += tokens
        self.pending += tokens
        self.logprobs += logprobs
        self.length += len(tokens)
        self.generated += len(tokens)
        self.stay_tokens += len(tokens)

    def enter(self, key: str) -> None:
        self.key, self.stay_tokens, self.emitted_versions = key, 0, []

    def stamps(self, version: Version) -> tuple[tuple[str, int], ...]:
        stamp = str(version)
        if self.pending and (not self.emitted_versions or self.emitted_versions[-1][0] != stamp):
            self.emitted_versions.append((stamp, self.stay_tokens - len(self.pending)))
        return tuple(self.emitted_versions)

    def append(self, tokens: Tokens, noise: str) -> Tokens:
        appended = super().append(tokens, noise)
        self.tokens += appended.tolist()
        return appended

    def take(self, version: Version) -> tuple[Tokens, Floats, Drafts | None]:
        """Returns the tokens that were not emitted yet, which count as emitted under `version` from
        now on.
        """
        self.stamps(version)
        drafts = self.stay_drafts.take() if self.stay_drafts is not None and self.pending else None
        tokens, logprobs = np.array(self.pending, np.uint32), np.array(self.logprobs, np.float32)
        self.pending, self.logprobs = [], []
        return tokens, logprobs, drafts


class WorkerDrafts:
    """Drafts inside vLLM's workers (`proposer.py`), for at most `slots` sequences."""

    def __init__(self, core: LocalCore, source: DraftSource, gate: DraftGate, slots: int) -> None:
        with open_draft_counters(slots) as (self._counters, path):
            core.draft_from(worker_source(core, source), gate.rule.kind, gate.forced, path)

    def stats(self) -> DraftStats:
        return self._counters.stats()

    def open_stay(self, stay: int, others: Iterable[StayDrafts | None]) -> StayDrafts:
        """Returns statistics in a place of the counters that no other stay uses."""
        taken = {other.place for other in others if other is not None}
        place = next(place for place in count() if place not in taken)
        return StayDrafts(self._counters, place, stay)


def open_drafts(
    core: EngineCore, source: DraftSource | None, gate: DraftGate, slots: int
) -> WorkerDrafts | None:
    """Turns drafting on; None without a source. Raises `EngineRefused` if vLLM cannot draft from
    it.
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
    """Returns the source from which the workers draft. Raises `EngineRefused` if they can read
    none.
    """
    if not core.has_process:
        return source
    # A core in another process reads only the node's history, a file.
    node = source.node if isinstance(source, CombinedSource) else source
    path = getattr(node, "path", None)
    if path is None:
        raise EngineRefused(
            "drafts: vLLM's core is another process, which can read the node's history only, not "
            "the rollout's own (rollouts.vllm.process = false drafts from that)"
        )
    return str(Path(path).absolute())


class VllmEngine(QueuedEngine[VllmSequence]):
    """`tensors` are of any floating dtype, under their checkpoint names. With `settings.process`
    vLLM computes in a process of its own, also between calls, and drafts come from the node's
    history only; without, only inside `poll`.
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
        super().__init__(version, options.slots, options.context_max, int(model_config.vocab_size))
        self._emit_every = options.emit_every
        gate = measured_gate(options.gate)
        longest = 0 if options.drafts is None else gate.rule.most
        self._core, self._weights, self._adapters = open_core_and_weights(
            model_config, options, settings or VllmSettings(), longest
        )
        weakref.finalize(self, self._core.release).atexit = False
        self._drafting = open_drafts(self._core, options.drafts, gate, self.slots)
        self._inside: dict[str, VllmSequence] = {}  # sequences with a request in vLLM, by its key
        self._stays = 0
        # Requests that vLLM dropped when it was paused last.
        self._dropped: frozenset[str] = frozenset()
        self._weights.load(self._weights.prepare(WeightUpdate(version, tensors)))
        self._core.resume()

    @property
    def _rows(self) -> ValuesView[VllmSequence]:
        return self._inside.values()

    @property
    def versions(self) -> list[Version]:
        return sorted(self._adapters.loaded) if self._adapters else super().versions

    @property
    def is_side_by_side(self) -> bool:
        return self._adapters is not None and bool(self._adapters.loaded)

    def stats(self) -> EngineStats:
        stats, load = super().stats(), self._core.load
        # They wait inside vLLM.
        inside = min(load.waiting, len(self._inside))
        return replace(stats, running=stats.running - inside, waiting=stats.waiting + inside)

    def _kv(self) -> tuple[int, int]:
        capacity = self._core.kv_capacity
        if not self._inside:  # vLLM's statistics are those of its last step
            return 0, capacity
        return round(self._core.load.kv_share * capacity), capacity

    def _drafts(self) -> DraftStats:
        return DraftStats() if self._drafting is None else self._drafting.stats()

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        if update.scaling is None:
            return super().prepare(update)
        return self._served_adapters().prepare(update)

    def update(self, update: WeightUpdate, mode: UpdateMode) -> None:
        if update.scaling is None:
            super().update(update, mode)
            return
        self._weights = adapters = self._served_adapters()
        follows = any(sequence.request.version is None for sequence in self._known.values())
        if mode == "keep_version" and not follows:
            adapters.load_beside(update)
        else:
            super().update(update, mode)
        self.version = max(adapters.loaded)
        self._unload()

    def _served_adapters(self) -> VllmAdapters:
        if self._adapters is None:
            raise EngineRefused("an adapter: this engine was opened for whole weights only")
        return self._adapters

    def _unload(self) -> None:
        if self._adapters is not None:
            self._adapters.keep({sequence.request.version for sequence in self._known.values()})

    def abort(self, trajectory: str) -> Emission | None:
        emission = super().abort(trajectory)
        self._unload()
        return emission

    def _load(self, update: WeightUpdate, mode: UpdateMode) -> None:
        """1. Load the new weights. 2. End the stay of each sequence that vLLM has not started, or
        has dropped, and queue it again. 3. Resume decoding, with or without the KV cache, as the
        mode requires.
        """
        super()._load(update, mode)  # 1
        idle = [s for s in self._rows if not s.stay_tokens or s.key in self._dropped]  # 2
        # The next stay finds no keys and values of other weights in the prefix cache.
        for sequence in reversed(idle):
            self._release(sequence)
            self._waiting.appendleft(sequence)
        if mode == "in_flight_recompute":  # 3
            self._core.reset_cache()
        self._core.resume()

    def _flush(self) -> None:
        # vLLM stays paused until `_load`.
        paused = self._core.pause()
        self._dropped = paused.dropped
        self._take(paused.outputs)
        super()._flush()

    # ---- sequences -----------------------------------------------------------------------------

    def _open(self, request: GenerationRequest) -> VllmSequence:
        check_temperature(request.sampling.temperature)
        adapters = self._adapters
        must_name = adapters and adapters.loaded and adapters.followed is None
        if request.version not in self.versions and (request.version or must_name):
            raise EngineRefused(f"trajectory {request.trajectory!r}: {request.version} is not here")
        return VllmSequence(request, self.context_max)

    def _enter(self, sequence: VllmSequence) -> bool:
        self._stays += 1
        sequence.enter(f"{sequence.trajectory}/{self._stays}")
        if self._drafting is not None:
            others = (other.stay_drafts for other in self._rows)
            sequence.stay_drafts = self._drafting.open_stay(self._stays, others)
        self._inside[sequence.key] = sequence
        adapter = self._adapters.of(sequence.request.version) if self._adapters else None
        salt = f"{self.version}/{self._core.loads}"
        # vLLM never has more requests than there are slots, so it admits each at once unless its KV
        # cache is full.
        self._core.add(
            CoreRequest(
                key=sequence.key,
                tokens=list(sequence.tokens),
                sampling=sequence.request.sampling,
                room=sequence.room,
                seed=sequence.seed,
                salt=salt if adapter is None else f"{adapter.name}/{adapter.load}",
                prompt=sequence.prompt,
                group=sequence.request.group,
                place=0 if sequence.stay_drafts is None else sequence.stay_drafts.place,
                stay=self._stays,
                adapter=adapter,
            )
        )
        return True

    def _step(self, end_s: float) -> bool:
        outputs = self._core.step(max(0.0, end_s - time.monotonic()))
        self._steps += bool(outputs)
        self._take(outputs)
        if any(output.finish for output in outputs):
            self._unload()
        return time.monotonic() < end_s

    def _collect(self, sequence: VllmSequence) -> tuple[Tokens, Floats, Drafts | None]:
        return sequence.take(sequence.request.version or self.version)

    def _park(self, sequence: VllmSequence) -> None:
        """Do nothing: vLLM keeps the keys and values in its prefix cache while there is room."""

    def _evict(self, sequence: VllmSequence) -> None:
        """Do nothing: vLLM evicts from its prefix cache itself."""

    def _release(self, sequence: VllmSequence) -> None:
        if self._inside.pop(sequence.key, None) is not None:
            self._core.drop([sequence.key])

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
        del self._inside[sequence.key]
        self._end_turn(sequence, "stop" if output.finish == "stop" else "length")

    def _check_stamps(self, sequence: VllmSequence, output: StepOutput) -> None:
        # Stamps do not cover adapters. The request names its version's adapter, which generates it
        # from the first to the last token.
        if sequence.request.version is not None:
            return
        emitted = sequence.stamps(self.version)
        if output.versions != emitted:
            raise EngineRefused(
                f"{output.key}: vLLM stamped its tokens {output.versions}, "
                f"but they were emitted as {emitted}"
            )
