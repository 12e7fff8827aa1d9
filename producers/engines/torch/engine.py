"""The embedded engine: implements `Engine` in one process, without a thread of its own.

A sequence is waiting, running in the batch, held after a stop, or ready to continue after the
environment appended tokens; this file moves sequences between these states and emits their tokens.
All tokens are emitted before the version changes, so an emission names the version that generated
its tokens (invariant 3).

The decoder is chosen by the model's configuration and, where it uses transformers' forward, tested.
A model that the engine cannot serve is refused before any memory is allocated.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rollstream.errors import EngineRefused
from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.engines.base import (
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
from rollstream.producers.engines.torch.batch import DecodeBatch
from rollstream.producers.engines.torch.decoder import Decoder
from rollstream.producers.engines.torch.hf_decoder import TransformersDecoder
from rollstream.producers.engines.torch.llama import FusedDecoder
from rollstream.producers.engines.torch.llama_weights import FusedShape, fused_shape
from rollstream.producers.engines.torch.prefill import CacheExtension, PrefixCache, extend_caches
from rollstream.producers.engines.torch.rows import TorchSequence
from rollstream.producers.engines.torch.speculative import SpeculativeBatch
from rollstream.producers.engines.torch.weights import PreparedWrites
from rollstream.streams.values import Tokens, Version

# Sliding attention is full attention where its window holds the context.
_SERVED_LAYERS = {"full_attention", "sliding_attention"}


def refuse_unsupported(config: PreTrainedConfig, context_max: int) -> None:
    """Raise `EngineRefused`, which names the property of the configuration that is not served."""
    name = type(config).__name__
    if config.is_encoder_decoder:
        raise EngineRefused(
            f"{name}: encoder-decoder models are not served, only decoder-only ones"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EngineRefused(f"{name}: transformers has no causal language model for it")
    rope = getattr(config, "rope_parameters", None) or {}  # pyright: ignore[reportUnknownVariableType]
    if rope.get("rope_type") in ("dynamic", "longrope"):  # pyright: ignore[reportUnknownMemberType]
        # Its frequencies follow the longest sequence seen, so a token would depend on its
        # neighbours (invariant 10).
        raise EngineRefused(f"{name}: rope type {rope['rope_type']!r} depends on the batch")
    if unserved := set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS:
        raise EngineRefused(f"{name}: layers of type {', '.join(sorted(unserved))} are not served")
    window = _window(config)
    if window is not None and window < context_max:
        raise EngineRefused(
            f"{name}: sliding window of {window} tokens; only full attention is served, "
            f"so set context_max (now {context_max}) to at most {window}"
        )


def _window(config: PreTrainedConfig) -> int | None:
    """The smallest attention window of a layer in tokens, None for full attention."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    local = "local" in (getattr(config, "attention_layers", None) or ())
    window = getattr(config, "window_size" if local else "sliding_window", None)
    return window if isinstance(window, int) else None


def open_decoder(
    config: PreTrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    context_max: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """The fused decode path where it serves the configuration, else transformers' forward. Raises
    `EngineRefused` with the reason where neither does.
    """
    refuse_unsupported(config, context_max)
    shape = fused_shape(config)
    if isinstance(shape, FusedShape):
        decoder = FusedDecoder(shape, config, context_max, dtype, device)
        decoder.served.load(tensors)
        return decoder
    generic = TransformersDecoder(config, context_max, dtype, device)
    generic.served.load(tensors)
    generic.check_forward()
    return generic


class TorchEngine:
    """Continuous batching of one decoder-only model.

    `tensors` are the weights of `version` under their checkpoint names, of any floating dtype; the
    layers compute in `dtype`. Drafts change the speed only: the tokens are the same.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        tensors: Mapping[str, torch.Tensor],
        version: Version,
        options: EngineOptions,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.version = version
        self.slots, self.context_max = options.slots, options.context_max
        device = torch.device(options.device or "cpu")
        self._decoder = open_decoder(model_config, tensors, self.context_max, dtype, device)
        self._batch = _open_batch(self._decoder, options)
        self._prefixes = PrefixCache(self._decoder, self.slots * self.context_max // 4)
        self._known: dict[str, TorchSequence] = {}
        self._waiting: deque[TorchSequence] = deque()
        self._ready: deque[TorchSequence] = deque()
        self._parked: dict[str, torch.Tensor] = {}
        """KV of held and of ready sequences; each keeps a slot reserved."""
        self._outbox: list[Emission] = []
        self._serving = True
        self._held: Version | None = version
        """The version whose weights are served whole; None during an update and after a failed
        one.
        """
        self._steps = self._tokens = 0
        self._busy_s = 0.0

    def submit(self, request: GenerationRequest) -> None:
        check_request(request, self._known, self._decoder.vocabulary)
        check_room(request, self.context_max)
        sequence = TorchSequence(request, self.context_max)
        self._known[request.trajectory] = sequence
        self._waiting.append(sequence)

    @torch.inference_mode()
    def poll(self, deadline_s: float) -> list[Emission]:
        end, began = time.monotonic() + deadline_s, time.thread_time()
        while self._serving and not self._outbox:
            self._admit()
            if not self._batch.rows:
                break
            self._step()
            if time.monotonic() >= end:
                break
        self._busy_s += time.thread_time() - began
        if not self._serving:
            return []
        emissions, self._outbox = self._outbox, []
        return emissions

    def append(self, trajectory: str, tokens: Tokens) -> None:
        sequence = self._known.get(trajectory)
        if sequence is None or trajectory not in self._parked or sequence.finish != "stop":
            raise EngineRefused(f"trajectory {trajectory!r} is not held after a stop")
        check_append(trajectory, tokens, self._decoder.vocabulary)
        sequence.append(tokens)
        sequence.finish = None
        self._ready.append(sequence)

    @torch.inference_mode()
    def abort(self, trajectory: str) -> Emission | None:
        sequence = self._known.pop(trajectory, None)
        if sequence is None:
            return None
        if sequence.row >= 0:
            self._emit(sequence)
            self._batch.leave(sequence)
        elif trajectory in self._parked:
            del self._parked[trajectory]
            if sequence in self._ready:
                self._ready.remove(sequence)
        else:
            self._waiting.remove(sequence)
        return take_back(self._outbox, trajectory)

    @torch.inference_mode()
    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        return self._decoder.served.prepare_for(update, self._held)

    @torch.inference_mode()
    def update(self, update: WeightUpdate, mode: UpdateMode) -> None:
        if mode == "keep_version" and self._known and update.version != self.version:
            raise EngineRefused(
                f"keep_version: {len(self._known)} trajectories are still here; nothing was changed"
            )
        self._flush()
        self._prefixes.clear()
        self._serving = False
        if not isinstance(update.prepared, PreparedWrites):
            update = self.prepare(update)
        held, self._held = self._held, None
        self._decoder.served.apply(update, held)
        self._held = self.version = update.version
        if mode == "in_flight_recompute":
            began = time.thread_time()
            self._recompute()
            self._busy_s += time.thread_time() - began
        self._serving = True

    @torch.inference_mode()
    def read_back(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        return self._decoder.served.compare(names, tensors)

    def running(self) -> list[str]:
        return list(self._known)

    def stats(self) -> EngineStats:
        parked = sum(kv.shape[2] for kv in self._parked.values())
        return EngineStats(
            slots=self.slots,
            running=len(self._batch.rows) + len(self._parked),
            waiting=len(self._waiting),
            kv_used=self._batch.tokens_cached + parked,
            kv_capacity=self.slots * self.context_max,
            steps=self._steps,
            tokens=self._tokens,
            busy_s=self._busy_s,
            drafts=self._batch.drafts,
        )

    def _admit(self) -> None:
        """Fill free slots: first ready sequences, in their own slots, then waiting ones."""
        while self._ready:
            sequence = self._ready.popleft()
            past = self._parked.pop(sequence.trajectory)
            if sequence.full:
                self._end(sequence, "length")
                continue
            grown = CacheExtension(sequence.prefix[past.shape[2] :], past)
            self._batch.enter(sequence, extend_caches(self._decoder, [grown])[0])
        while self._waiting and len(self._batch.rows) + len(self._parked) < self.slots:
            if self._waiting[0].full:
                self._end(self._waiting.popleft(), "length")
                continue
            kv = self._prefixes.get(self._waiting)
            self._batch.enter(self._waiting.popleft(), kv)

    def _step(self) -> None:
        ended = self._batch.step()
        self._tokens += self._batch.gained
        for sequence in ended:
            self._emit(sequence)
            if sequence.hold and sequence.finish == "stop":
                self._parked[sequence.trajectory] = self._batch.cached(sequence)
            else:
                del self._known[sequence.trajectory]
            self._batch.leave(sequence)
        self._steps += 1
        if self._batch.emission_due:
            self._flush()

    def _flush(self) -> None:
        for sequence in self._batch.rows:
            self._emit(sequence)
        self._batch.restart_block()

    def _emit(self, sequence: TorchSequence) -> None:
        tokens, logprobs = self._batch.collect(sequence)
        if len(tokens):
            name, drafts = sequence.trajectory, self._batch.drafted(sequence)
            emission = Emission(name, tokens, logprobs, self.version, sequence.finish, drafts)
            self._outbox.append(emission)

    def _end(self, sequence: TorchSequence, finish: Literal["stop", "length"]) -> None:
        """End a sequence without another token."""
        del self._known[sequence.trajectory]
        nothing = np.zeros(0, np.uint32), np.zeros(0, np.float32)
        self._outbox.append(Emission(sequence.trajectory, *nothing, self.version, finish))

    def _recompute(self) -> None:
        """Recompute the KV of all rows and of all held sequences; appended tokens that were not
        prefilled yet are left to be prefilled.
        """
        rows = self._batch.rows
        held = [self._known[name] for name in self._parked]
        lengths = [self._parked[sequence.trajectory].shape[2] for sequence in held]
        fresh = extend_caches(
            self._decoder,
            [CacheExtension(sequence.prefix) for sequence in rows]
            + [
                CacheExtension(sequence.tokens[:length])
                for sequence, length in zip(held, lengths, strict=True)
            ],
        )
        for sequence, kv in zip(rows, fresh, strict=False):
            self._batch.recache(sequence, kv)
        for sequence, kv in zip(held, fresh[len(rows) :], strict=True):
            assert kv is not None
            self._parked[sequence.trajectory] = kv


def _open_batch(decoder: Decoder, options: EngineOptions) -> DecodeBatch:
    """A batch that verifies drafts where `options` has a source for them."""
    sizes = options.slots, options.context_max, options.emit_every
    if options.drafts is None:
        return DecodeBatch(decoder, *sizes)
    return SpeculativeBatch(decoder, *sizes, options.drafts, options.gate or DraftGate())
