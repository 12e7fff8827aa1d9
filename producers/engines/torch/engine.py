"""The engine `torch`: generates inside the rollout's process, without a thread of its own. The
fused decode path serves Llama and Qwen families, transformers' forward pass others.
"""

import time
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import (
    DraftStats,
    GenerationRequest,
    UpdateMode,
    WeightUpdate,
)
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.queue import NO_TOKENS, EngineWeights, QueuedEngine
from rollstream.producers.engines.torch.adapters import ServedAdapters
from rollstream.producers.engines.torch.batch import DecodeBatch
from rollstream.producers.engines.torch.decoder import Decoder
from rollstream.producers.engines.torch.llama import FusedDecoder
from rollstream.producers.engines.torch.llama_weights import FusedShape, fused_shape
from rollstream.producers.engines.torch.prefill import CacheExtension, PrefixCache, extend_caches
from rollstream.producers.engines.torch.rows import TorchSequence
from rollstream.streams.values import Drafts, Floats, Tokens, Version

if TYPE_CHECKING:  # the fused decoder needs no code of models
    from transformers import PreTrainedModel

# Sliding attention equals full attention if its window is not smaller than the context.
_SERVED_LAYERS = {"full_attention", "sliding_attention"}

_NO_ADAPTERS = (
    "an adapter (model.lora) is served for Llama- and Qwen-family models only; this model decodes "
    "through transformers' forward"
)


def refuse_model(model: "PreTrainedModel", context_max: int, is_adapted: bool) -> None:
    """Raise `EngineRefused` for a model, which may be on the meta device, or its adapter
    (`is_adapted`).
    """
    refuse_unsupported(model.config, context_max)
    shape = fused_shape(model.config)
    if isinstance(shape, FusedShape):
        return
    if is_adapted:
        raise EngineRefused(f"{_NO_ADAPTERS} ({shape})")
    from rollstream.producers.engines.torch.hf_decoder import refuse_form

    refuse_form(model, context_max)


def refuse_unsupported(config: PreTrainedConfig, context_max: int) -> None:
    """Raise `EngineRefused`, which names the property that no decoder serves."""
    name = type(config).__name__
    if config.is_encoder_decoder:
        raise EngineRefused(
            f"{name}: encoder-decoder models are not served, only decoder-only ones"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EngineRefused(f"{name}: transformers has no causal language model for it")
    rope = getattr(config, "rope_parameters", None) or {}  # pyright: ignore[reportUnknownVariableType]
    if rope.get("rope_type") in ("dynamic", "longrope"):  # pyright: ignore[reportUnknownMemberType]
        # The frequencies of this type follow the longest sequence seen, so a sequence's tokens
        # would depend on the other sequences of the batch (invariant 10).
        raise EngineRefused(f"{name}: rope type {rope['rope_type']!r} depends on the batch")
    if unserved := set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS:
        raise EngineRefused(f"{name}: layers of type {', '.join(sorted(unserved))} are not served")
    window = _window(config)
    if window is not None and window < context_max:
        raise EngineRefused(
            f"{name}: sliding window of {window} tokens; only full attention is served, "
            f"so set rollouts.context_max (now {context_max}) to at most {window}"
        )


def _window(config: PreTrainedConfig) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    # Layers may differ; the smallest window in tokens counts, None is full attention.
    local = "local" in (getattr(config, "attention_layers", None) or ())
    window = getattr(config, "window_size" if local else "sliding_window", None)
    return window if isinstance(window, int) else None


def open_decoder(
    config: PreTrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    context_max: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Decoder, EngineWeights]:
    """Returns a decoder, and its weights, which updates change. Raises `EngineRefused` with the
    reason if neither decode path serves the configuration.
    """
    refuse_unsupported(config, context_max)
    shape = fused_shape(config)
    if isinstance(shape, FusedShape):
        decoder = FusedDecoder(shape, config, context_max, dtype, device)
        return decoder, decoder.fill(tensors)
    # Imported here: a fused decoder needs none of transformers' modelling modules (two seconds).
    from rollstream.producers.engines.torch.hf_decoder import TransformersDecoder

    generic = TransformersDecoder(config, context_max, dtype, device)
    generic.served.fill(tensors)
    generic.check_forward()
    return generic, generic.served


class TorchEngine(QueuedEngine[TorchSequence]):
    """`tensors` are the weights of `version` under their checkpoint names, of any floating dtype.
    The KV of parked sequences is kept while it and that of the batch are at most `slots` ×
    `context_max` tokens.
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
        slots, context_max = options.slots, options.context_max
        device = torch.device(options.device or "cpu")
        self._decoder, weights = open_decoder(model_config, tensors, context_max, dtype, device)
        super().__init__(version, slots, context_max, self._decoder.vocabulary)
        self._weights: EngineWeights = weights
        self._decoder.served.held = version
        self._batch = _open_batch(self._decoder, options)
        self._prefixes = PrefixCache(self._decoder, slots * context_max // 4)
        self._parked_tokens = 0

    @property
    def _rows(self) -> list[TorchSequence]:
        return self._batch.rows

    @property
    def versions(self) -> list[Version]:
        adapters = self._decoder.adapters
        return sorted(adapters.loaded) if adapters and adapters.loaded else super().versions

    @property
    def is_side_by_side(self) -> bool:
        return self._decoder.adapters is not None and bool(self._decoder.adapters.loaded)

    def _open(self, request: GenerationRequest) -> TorchSequence:
        if request.version not in (None, *self.versions):
            raise EngineRefused(f"trajectory {request.trajectory!r}: {request.version} is not here")
        return TorchSequence(request, self.context_max)

    @torch.inference_mode()
    def _admit(self) -> None:
        free = max(0, self.slots - len(self._rows))
        # Those ready ones that get a slot now are prefilled together. One without room takes no
        # slot, so the next one behind it gets that.
        due = list(islice((s for s in self._ready if s.room), free))
        if due:
            parts = [
                CacheExtension(s.prefix[_length(s.parked) :], s.parked, s.request.version)
                for s in due
            ]
            for sequence, kv in zip(due, extend_caches(self._decoder, parts), strict=True):
                self._keep(sequence, kv)
        super()._admit()

    @torch.inference_mode()
    def _enter(self, sequence: TorchSequence) -> bool:
        if self._ready and self._ready[0] is sequence:
            kv = sequence.parked
            self._keep(sequence, None)
        else:
            kv = self._prefixes.get(self._waiting)  # of the first waiting one: this sequence
        self._batch.enter(sequence, kv)
        return True

    def _keep(self, sequence: TorchSequence, kv: torch.Tensor | None) -> None:
        self._parked_tokens += _length(kv) - _length(sequence.parked)
        sequence.parked = kv

    @torch.inference_mode()
    def _step(self, end_s: float) -> bool:
        ended = self._batch.step()
        self._tokens += self._batch.gained
        for sequence in ended:
            assert sequence.finish is not None, "the batch sets it"
            self._end_turn(sequence, sequence.finish)
        if ended:
            self._unload()
        self._steps += 1
        if self._batch.emission_due:
            self._flush()
        return time.monotonic() < end_s

    @torch.inference_mode()
    def _flush(self) -> None:
        super()._flush()
        self._batch.restart_block()

    @torch.inference_mode()
    def _collect(self, sequence: TorchSequence) -> tuple[Tokens, Floats, Drafts | None]:
        if sequence.row < 0:
            return *NO_TOKENS, None
        tokens, logprobs = self._batch.collect(sequence)
        return tokens, logprobs, self._batch.drafted(sequence) if len(tokens) else None

    @torch.inference_mode()
    def _park(self, sequence: TorchSequence) -> None:
        self._keep(sequence, self._batch.cached(sequence))
        self._batch.leave(sequence)
        capacity = self.slots * self.context_max
        while self._batch.tokens_cached + self._parked_tokens > capacity and self._evict_one():
            pass

    def _evict(self, sequence: TorchSequence) -> None:
        self._keep(sequence, None)

    @torch.inference_mode()
    def _release(self, sequence: TorchSequence) -> None:
        self._keep(sequence, None)
        if sequence.row >= 0:
            self._batch.leave(sequence)

    def _kv(self) -> tuple[int, int]:
        return self._batch.tokens_cached, self.slots * self.context_max

    def _drafts(self) -> DraftStats:
        return self._batch.drafts

    @torch.inference_mode()
    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        if update.scaling is None:
            return super().prepare(update)
        return self._adapters().prepare(update)

    @torch.inference_mode()
    def update(self, update: WeightUpdate, mode: UpdateMode) -> None:
        if update.scaling is None:
            super().update(update, mode)
            return
        adapters = self._adapters()
        follows = any(sequence.request.version is None for sequence in self._known.values())
        if mode == "keep_version" and not follows:
            adapters.load(update)
            self._prefixes.keep(adapters.loaded)
        else:
            super().update(update, mode)
        self._weights, self.version = adapters, adapters.newest or update.version
        self._unload()
        self._batch.change_adapters()

    def _adapters(self) -> ServedAdapters:
        if self._decoder.adapters is None:
            raise EngineRefused(_NO_ADAPTERS)
        return self._decoder.adapters

    def _unload(self) -> None:
        if self._decoder.adapters is not None:
            versions = {sequence.request.version for sequence in self._known.values()}
            self._decoder.adapters.keep(versions)
            # The prompts' KV under a dropped adapter is useless.
            self._prefixes.keep({None, *self._decoder.adapters.loaded})

    @torch.inference_mode()
    def _load(self, update: WeightUpdate, mode: UpdateMode) -> None:
        self._prefixes.clear()
        if update.scaling is None:
            super()._load(update, mode)
        else:
            self._adapters().load(update)
            self._batch.change_adapters()
        if mode == "in_flight_recompute":
            began = time.thread_time()
            self._recompute()
            self._busy_s += time.thread_time() - began

    def _recompute(self) -> None:
        # Sequences outside of the batch get their KV again when they continue.
        self._evict_all()
        rows = self._batch.rows
        parts = [CacheExtension(s.prefix, version=s.request.version) for s in rows]
        for sequence, kv in zip(rows, extend_caches(self._decoder, parts), strict=True):
            self._batch.recache(sequence, kv)


def _length(kv: torch.Tensor | None) -> int:
    return 0 if kv is None else kv.shape[2]


def _open_batch(decoder: Decoder, options: EngineOptions) -> DecodeBatch:
    sizes = options.slots, options.context_max, options.emit_every
    if options.drafts is None:
        return DecodeBatch(decoder, *sizes)
    # Imported here: an engine that does not draft reads nothing of drafts.
    from rollstream.producers.drafts.gate import measured_gate
    from rollstream.producers.engines.torch.speculative import SpeculativeBatch

    return SpeculativeBatch(decoder, *sizes, options.drafts, measured_gate(options.gate))
