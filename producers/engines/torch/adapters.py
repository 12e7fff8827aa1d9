"""Serves LoRA adapters of several versions over frozen weights (docs/explanation/lora.md has the
cost).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.producers.engines.torch.llama_weights import (
    FusedShape,
    attention_scale,
    expected_shapes,
    head_views,
)
from rollstream.producers.engines.torch.weights import ServedWeights, WeightView
from rollstream.storage.model_folder.lora import HIGH, LOW, PREFIX
from rollstream.streams.values import Version

QKV, OUTPUT, GATE_UP, DOWN = range(4)
"""Indices of a layer's products, those of its four fused matrices (`llama_weights.py`)."""
PADDED_MAX = 2.0
"""The versions' products are one batched call with at most this many times as many rows as are in
use.
"""


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """`low` is (in, k), `high` (k, out); stacked factors have the versions first. k is the sum of
    the ranks of all fused matrices; one without an adapter has zeros. Multiplied in are the norm
    before the matrix, the scale of attention, and the adapter's alpha / rank.
    """

    low: Tensor
    high: Tensor


LayerFactors = Sequence[Sequence[LowRankFactors | None]]
"""By layer and product, None for a product of which no matrix has an adapter."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """`weights` maps its checkpoint's tensors to views of its factors."""

    layers: LayerFactors
    weights: ServedWeights


@dataclass(frozen=True, slots=True)
class AdapterRoutes:
    """Maps the rows of a batch to adapters. Gathered row j is row `order[j]` of the batch, and row
    i of the batch is at `places[i]`. Each of `parts` is an adapter and the range [begin, end) of
    its gathered rows. With `order` None a single adapter serves all rows.
    """

    parts: tuple[tuple[LoadedAdapter, int, int], ...]
    order: Tensor | None = None
    places: Tensor | None = None
    stack: LayerFactors | None = None

    def add(self, out: Tensor, x: Tensor, layer: int, product: int) -> None:
        """Add the low-rank products of `x` (n, in) to `out` (n, out), in place."""
        if self.order is None or self.places is None:
            factors = self.parts[0][0].layers[layer][product]
            if factors is not None:
                out.addmm_(torch.mm(x, factors.low), factors.high)
            return
        rows = x.index_select(0, self.order)
        if self.stack is None:
            terms = self._by_version(rows, out.shape[1], layer, product)
        else:
            factors = self.stack[layer][product]
            if factors is None:
                return
            each = rows.view(len(self.parts), -1, rows.shape[1])
            terms = torch.bmm(torch.bmm(each, factors.low), factors.high).flatten(0, 1)
        out.add_(terms.index_select(0, self.places))

    def _by_version(self, rows: Tensor, outputs: int, layer: int, product: int) -> Tensor:
        terms = rows.new_empty(rows.shape[0], outputs)
        for adapter, begin, end in self.parts:
            factors, part = adapter.layers[layer][product], terms[begin:end]
            if factors is None:
                part.zero_()
            else:
                torch.mm(torch.mm(rows[begin:end], factors.low), factors.high, out=part)
        return terms


@dataclass(slots=True)
class ServedAdapters:
    """Rows that name no version are served by the `newest`. `latest` was loaded last, and may be
    old.
    """

    shape: FusedShape
    norms: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device
    loaded: dict[Version, LoadedAdapter] = field(default_factory=dict[Version, LoadedAdapter])
    newest: Version | None = None
    latest: Version | None = None
    _last: LoadedAdapter | None = None
    _stack: tuple[tuple[LoadedAdapter, ...], LayerFactors] | None = None

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        """Returns the update with its adapter in the served layout. Raises `EngineRefused`, which
        names the wrong, missing or unknown tensor.
        """
        assert update.scaling is not None, "whole weights are no adapter"
        views: dict[str, tuple[WeightView, ...]] = {}
        layers = [
            self._layer(index, update.tensors, update.scaling, views)
            for index in range(self.shape.layers)
        ]
        if unknown := sorted(set(update.tensors) - set(views)):
            raise EngineRefused(f"weights: tensor {unknown[0]!r} is of no layer that is served")
        checkpoint = {**self.norms, **update.tensors}
        weights = ServedWeights(
            views, {name: tuple(tensor.shape) for name, tensor in checkpoint.items()}
        )
        weights.fill(checkpoint)
        return replace(update, prepared=LoadedAdapter(layers, weights))

    def load(self, update: WeightUpdate) -> None:
        """Serve this version beside the others, in place of an earlier load of it."""
        if not isinstance(update.prepared, LoadedAdapter):
            update = self.prepare(update)
        assert isinstance(update.prepared, LoadedAdapter), "prepare sets it"
        self.loaded[update.version] = self._last = update.prepared
        self.latest = update.version
        self.newest = max(update.version, self.newest or update.version)

    def keep(self, versions: Collection[Version | None]) -> None:
        """Drop the adapters of all versions but these, the newest and the latest one."""
        # The requests for which the latest one was loaded may not have arrived yet.
        served = {*versions, self.newest, self.latest}
        if not served.issuperset(self.loaded):
            self.loaded = {v: adapter for v, adapter in self.loaded.items() if v in served}
            self._stack = None

    def compare(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> WeightComparison:
        assert self._last is not None, "no adapter was loaded"
        return self._last.weights.compare(names, {**self.norms, **tensors})

    def routes(
        self, versions: Sequence[Version | None], repeats: int | Sequence[int] = 1
    ) -> AdapterRoutes | None:
        """Returns the routes for sequences that name these `versions`, with `repeats` rows each.
        None while no adapter is loaded.
        """
        if not self.loaded or not versions:
            return None
        sequence_versions = [version or self.newest for version in versions]
        kinds = sorted({version for version in sequence_versions if version is not None})
        if len(kinds) == 1:
            return AdapterRoutes(((self.loaded[kinds[0]], 0, len(sequence_versions)),))
        index = {version: i for i, version in enumerate(kinds)}
        row_kinds = np.repeat([index[v] for v in sequence_versions if v is not None], repeats)
        counts = np.bincount(row_kinds, minlength=len(kinds))
        rows_max = int(counts.max())
        stack = None
        if rows_max * len(kinds) <= PADDED_MAX * len(row_kinds):
            stack = self._stacked(tuple(self.loaded[version] for version in kinds))
        order = np.argsort(row_kinds, kind="stable")
        sizes = counts if stack is None else np.full(len(kinds), rows_max)
        ends = np.cumsum(sizes)
        # Row r of a part is gathered at its begin + r; as padding, row 0 of the batch is gathered.
        within = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(ends - sizes, counts) + within
        gathered, places = np.zeros(ends[-1], np.int64), np.empty(len(order), np.int64)
        gathered[at], places[order] = order, at
        parts = tuple(
            (self.loaded[version], int(end - size), int(end))
            for version, size, end in zip(kinds, sizes, ends, strict=True)
        )
        return AdapterRoutes(parts, self._indices(gathered), self._indices(places), stack)

    def _indices(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)  # pyright: ignore[reportUnknownMemberType]

    def _stacked(self, adapters: tuple[LoadedAdapter, ...]) -> LayerFactors | None:
        # Kept for later calls: adapters change far less often than rows.
        if self._stack is None or self._stack[0] != adapters:
            layers = _stacked_layers([adapter.layers for adapter in adapters])
            if layers is None:
                return None
            self._stack = adapters, layers
        return self._stack[1]

    def _layer(
        self,
        index: int,
        tensors: Mapping[str, Tensor],
        scaling: float,
        views: dict[str, tuple[WeightView, ...]],
    ) -> list[LowRankFactors | None]:
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = [f"{attention}{part}_proj" for part in "qkv"]
        gate_up = [f"{mlp}{part}_proj" for part in ("gate", "up")]
        # In the order `QKV`, `OUTPUT`, `GATE_UP`, `DOWN`, each with the norm before it.
        products = (
            (qkv, f"{prefix}input_layernorm.weight"),
            ([f"{attention}o_proj"], None),
            (gate_up, f"{prefix}post_attention_layernorm.weight"),
            ([f"{mlp}down_proj"], None),
        )
        return [self._factors(names, norm, tensors, scaling, views) for names, norm in products]

    def _factors(
        self,
        names: Sequence[str],
        norm: str | None,
        tensors: Mapping[str, Tensor],
        scaling: float,
        views: dict[str, tuple[WeightView, ...]],
    ) -> LowRankFactors | None:
        adapted = [name for name in names if f"{PREFIX}{name}{LOW}" in tensors]
        if not adapted:
            return None
        shapes = expected_shapes(self.shape)
        outputs = sum(shapes[f"{name}.weight"][0] for name in names)
        inputs = shapes[f"{names[0]}.weight"][1]
        ranks = [tensors[f"{PREFIX}{name}{LOW}"].shape[0] for name in adapted]
        # Not filled yet: the views added below fill them.
        low = torch.zeros(inputs, sum(ranks), dtype=self.dtype, device=self.device)
        high = torch.zeros(sum(ranks), outputs, dtype=self.dtype, device=self.device)
        begin = 0
        for name, rank in zip(adapted, ranks, strict=True):
            rank_slice = slice(begin, begin + rank)
            begin += rank
            self._check(name, tensors, (rank, inputs), (shapes[f"{name}.weight"][0], rank))
            views[f"{PREFIX}{name}{LOW}"] = (WeightView(low[:, rank_slice].t(), norm=norm),)
            view, scale = self._high_view(names.index(name), len(names), high[rank_slice])
            views[f"{PREFIX}{name}{HIGH}"] = (WeightView(view, scale * scaling),)
        return LowRankFactors(low, high)

    def _high_view(self, part: int, parts: int, high: Tensor) -> tuple[Tensor, float]:
        # The view has the elements of the checkpoint's tensor B (outputs × rank) in their order.
        if parts == 3:  # queries, keys, values
            scale = attention_scale(self.shape) or 1.0
            return head_views(high, self.shape)[part], scale if part == 0 else 1.0
        width = high.shape[1] // parts
        return high[:, part * width : (part + 1) * width].t(), 1.0

    def _check(
        self, name: str, tensors: Mapping[str, Tensor], low: tuple[int, ...], high: tuple[int, ...]
    ) -> None:
        for kind, shape in ((LOW, low), (HIGH, high)):
            tensor = tensors.get(f"{PREFIX}{name}{kind}")
            if tensor is None or tuple(tensor.shape) != shape:
                fault = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise EngineRefused(
                    f"weights: the adapter's tensor {PREFIX}{name}{kind} is {fault}, the model "
                    f"needs {shape}"
                )


def _stacked_layers(adapters: Sequence[LayerFactors]) -> LayerFactors | None:
    layers: list[list[LowRankFactors | None]] = []
    for parts in zip(*adapters, strict=True):
        products: list[LowRankFactors | None] = []
        for product in zip(*parts, strict=True):
            # Shapes may differ, or only some adapters may have factors.
            pairs = [factors for factors in product if factors is not None]
            if len({(factors.low.shape, factors.high.shape) for factors in pairs}) > 1:
                return None
            if pairs and len(pairs) < len(product):
                return None
            low, high = [factors.low for factors in pairs], [factors.high for factors in pairs]
            products.append(LowRankFactors(torch.stack(low), torch.stack(high)) if pairs else None)
        layers.append(products)
    return layers
