"""Decodes other models than Llama and Qwen by transformers' forward, with the engine's own
`KVCache`, mask and positions. A model for which this does not work is refused when the engine
starts.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false, reportArgumentType=false

import inspect
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from rollstream.errors import EngineRefused
from rollstream.producers.engines.torch.adapters import AdapterRoutes, ServedAdapters
from rollstream.producers.engines.torch.attention import KVCache, KVShape, masks_ahead
from rollstream.producers.engines.torch.decoder import DraftedTokens, PrefillBatch
from rollstream.producers.engines.torch.prefill import CacheExtension, extend_caches
from rollstream.producers.engines.torch.rows import RowSegment
from rollstream.producers.engines.torch.weights import ServedWeights, WeightView
from rollstream.storage.model_folder.model_fit import is_misfit
from rollstream.storage.weights.tensors import untie
from rollstream.streams.values import Tokens

LOOK_AHEAD_TRIES = 3
LOOK_AHEAD_SHARE, LOOK_AHEAD_SHARE_ROUNDED = 1e-4, 2e-2
"""Most that another last token changes the logits before it by, relative to its own logits' change.
In float32, 30 random mixtures of experts give up to 1e-7, and attention in both directions gives
2e-3 and more; 16-bit types, which round to 4e-3, leave some of that unseen in a model with small
random weights.
"""


class _WindowLayer(CacheLayerMixin):
    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        raise NotImplementedError

    def get_max_length(self) -> int:
        return -1


class _StepLayer(_WindowLayer):
    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.first = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # New tokens go into the cache's next columns, in decode steps and verification passes.
        rows, column = key_states.shape[0], self.cache.column
        keys, values = self.cache.keys[self.index], self.cache.values[self.index]
        end = column + key_states.shape[2]
        keys[:rows, :, column:end] = key_states
        values[:rows, :, column:end] = value_states
        # Attention reads from the segment's first column to the new ones.
        window = slice(self.first, end)
        return keys[:rows, :, window], values[:rows, :, window]

    def get_seq_length(self) -> int:
        return self.cache.column - self.first


class _PrefillLayer(_WindowLayer):
    def __init__(self, past: torch.Tensor | None) -> None:
        super().__init__()
        self.past = past

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The caller reads them after the forward.
        self.keys, self.values = key_states, value_states
        if self.past is None:
            return key_states, value_states
        return (
            torch.cat((self.past[0], key_states), 2),
            torch.cat((self.past[1], value_states), 2),
        )

    def get_seq_length(self) -> int:
        return 0 if self.past is None else self.past.shape[3]


class TransformersDecoder:
    """The model has random weights until `served` is filled; then `check_forward` must be called.
    Raises `EngineRefused` for a model with too few positions, or whose forward or cache does not
    have the needed form.
    """

    # None: rows are never split into segments, since each segment would need a whole forward.
    segment_overhead_tokens: int | None = None
    adapters: ServedAdapters | None = None

    def __init__(
        self, config: PreTrainedConfig, context_max: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.device = dtype, device
        self.name = type(config).__name__
        _refuse_positions(config, context_max)
        with torch.random.fork_rng(devices=[]):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.model.eval().requires_grad_(False)
        self.model.to(device)
        self._last_logits_only: dict[str, int] = (
            {"logits_to_keep": 1} if "logits_to_keep" in _forward_arguments(self.model) else {}
        )
        self.vocabulary: int = self.model.get_output_embeddings().weight.shape[0]
        self.kv = _cached_shape(self.model, context_max)
        self._layers: list[_StepLayer] = []
        self.served = _served_weights(self.model)

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        used: tuple[RowSegment, ...],
        routes: AdapterRoutes | None = None,
    ) -> torch.Tensor:
        rows, (segment,) = ids.shape[0], used
        mask = cache.mask[:rows, None, None, segment.column : cache.column + 1]
        return self._forward(
            ids[:, None], positions[:, None], mask, self._cache_view(cache, segment)
        )

    def verify(
        self, drafted: DraftedTokens, cache: KVCache, used: tuple[RowSegment, ...]
    ) -> torch.Tensor:
        (segment,) = used
        (mask,) = masks_ahead(cache, used, drafted.ahead, 1)
        size = drafted.rows * drafted.ahead
        ids, positions = drafted.ids, drafted.positions
        if drafted.slots is not None:  # pad every row to `ahead` tokens
            ids = ids.new_zeros(size).index_copy_(0, drafted.slots, ids)
            positions = positions.new_zeros(size).index_copy_(0, drafted.slots, positions)
        logits = self.model(
            input_ids=ids.view(drafted.rows, -1),
            attention_mask=mask,
            position_ids=positions.view(drafted.rows, -1),
            past_key_values=self._cache_view(cache, segment),
            use_cache=True,
        ).logits.flatten(0, 1)
        return logits if drafted.slots is None else logits.index_select(0, drafted.slots)

    def _cache_view(self, cache: KVCache, segment: RowSegment) -> Cache:
        if not self._layers or self._layers[0].cache is not cache:
            self._layers = [_StepLayer(cache, index) for index in range(self.kv.layers)]
        for layer in self._layers:
            layer.first = segment.column
        return Cache(list(self._layers))

    def prefill(self, batch: PrefillBatch) -> torch.Tensor:
        past = batch.past
        layers = [
            _PrefillLayer(None if past is None else past[2 * index : 2 * index + 2])
            for index in range(self.kv.layers)
        ]
        self._forward(batch.ids, batch.positions, batch.mask, Cache(list(layers)))
        return torch.stack([part for layer in layers for part in (layer.keys, layer.values)])

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **self._last_logits_only,
        ).logits[:, -1]

    @torch.inference_mode()
    def check_forward(self) -> None:
        """Compare a prefill and one step of two sequences with the plain forward. Raises
        `EngineRefused` if they differ, or if a token attends to later ones.
        """
        sequences = [
            np.arange(1, length + 1, dtype=np.uint32) % self.vocabulary for length in (3, 6)
        ]
        cache = KVCache(self.kv, 2, 8, self.dtype, self.device)
        cache.column = 6
        try:
            kvs = extend_caches(self, [CacheExtension(tokens[:-1]) for tokens in sequences])
            starts = [cache.write(row, kv) for row, kv in enumerate(kvs)]
            ids = torch.tensor([int(tokens[-1]) for tokens in sequences], device=self.device)
            positions = torch.tensor([2, 5], device=self.device)
            cached_logits = self.step(ids, positions, cache, (RowSegment(0, 2, min(starts)),))
            plain_logits = torch.cat([self._plain(tokens) for tokens in sequences])
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise EngineRefused(
                f"{self.name}: does not run over the engine's cache: {error}"
            ) from error
        self._refuse_looking_ahead(sequences[1])
        tolerance = 1e-3 if self.dtype == torch.float32 else 5e-2
        off = float(
            (cached_logits - plain_logits).abs().max() / plain_logits.abs().max().clamp_min(1e-6)
        )
        if not off < tolerance:
            raise EngineRefused(
                f"{self.name}: a decode step over the engine's cache differs from its plain "
                f"forward by {off:.2g} of the largest logit"
            )

    def _refuse_looking_ahead(self, tokens: Tokens) -> None:
        # Equal bits cannot be required: which experts of a mixture the last token uses decides
        # which rows are multiplied together, and so how sums of other tokens are rounded.
        last_logits, before = self._plain(tokens), self._plain(tokens, -2)
        shares: list[float] = []
        for step in range(1, LOOK_AHEAD_TRIES + 1):
            other = tokens.copy()
            other[-1] = (other[-1] + step) % self.vocabulary
            # A token that is attended to changes logits about as much as its own.
            change = float((self._plain(other) - last_logits).abs().max())
            leak = float((self._plain(other, -2) - before).abs().max())
            shares.append(leak / max(change, 1e-12) if leak else 0.0)
        limit = LOOK_AHEAD_SHARE if self.dtype == torch.float32 else LOOK_AHEAD_SHARE_ROUNDED
        # The least change counts: a rounding error may choose another expert, but seldom.
        if min(shares) > limit:
            raise EngineRefused(
                f"{self.name}: attends to later tokens, so it is no decoder: another last token "
                f"changes the logits before it by {min(shares):.2g} of what it changes its own by"
            )

    def _plain(self, tokens: Tokens, position: int = -1) -> torch.Tensor:
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device).unsqueeze(0)
        return self.model(input_ids=ids, use_cache=False).logits[:, position]


def refuse_form(model: PreTrainedModel, context_max: int) -> None:
    """Raise `EngineRefused` as the constructor of `TransformersDecoder` does."""
    _refuse_positions(model.config, context_max)
    _forward_arguments(model)
    try:
        _cached_shape(model, context_max)
    except EngineRefused as error:
        # Code that looks at values fails on the meta device; it is checked again when it is served.
        if model.device.type != "meta" or error.__cause__ is None or is_misfit(error.__cause__):
            raise


def _refuse_positions(config: PreTrainedConfig, context_max: int) -> None:
    positions = getattr(config, "max_position_embeddings", context_max)
    if positions < context_max:
        raise EngineRefused(
            f"{type(config).__name__}: {positions} positions, fewer than rollouts.context_max "
            f"({context_max})"
        )


def _forward_arguments(model: PreTrainedModel) -> frozenset[str]:
    arguments = frozenset(inspect.signature(model.forward).parameters)
    if not {"past_key_values", "attention_mask", "position_ids"} <= arguments:
        raise EngineRefused(
            f"{type(model.config).__name__}: its forward does not take past_key_values, "
            "attention_mask and position_ids"
        )
    return arguments


@torch.inference_mode()
def _cached_shape(model: PreTrainedModel, context_max: int) -> KVShape:
    name = type(model.config).__name__
    cache = DynamicCache(config=model.config)
    try:
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device),
            past_key_values=cache,
            use_cache=True,
        )
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise EngineRefused(f"{name}: cannot run with a key-value cache: {error}") from error
    # Every layer must cache keys and values of all tokens, in one shape.
    kinds = {
        type(layer).__name__ for layer in cache.layers if not _keeps_all_tokens(layer, context_max)
    }
    if kinds or not cache.layers:
        raise EngineRefused(
            f"{name}: caches {', '.join(sorted(kinds)) or 'nothing'}, not plain keys and values"
        )
    shapes = {
        None if part is None else (part.shape[1], part.shape[3])
        for layer in cache.layers
        if isinstance(layer, DynamicLayer)
        for part in (layer.keys, layer.values)
    }
    shape = shapes.pop()
    if shapes or shape is None:
        raise EngineRefused(f"{name}: keys and values of its layers differ in shape")
    return KVShape(len(cache.layers), *shape)


def _served_weights(model: PreTrainedModel) -> ServedWeights:
    untied, tied = untie(model.state_dict())
    # A checkpoint may hold a tied tensor under any of its names.
    others: dict[str, tuple[str, ...]] = {}
    for name, owner in tied.items():
        others[owner] = (*others.get(owner, ()), name)
    return ServedWeights(
        {name: (WeightView(tensor),) for name, tensor in untied.items()},
        {name: tuple(tensor.shape) for name, tensor in untied.items()},
        others,
    )


def _keeps_all_tokens(layer: object, context_max: int) -> bool:
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.sliding_window >= context_max
    return type(layer) is DynamicLayer
