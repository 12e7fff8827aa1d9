"""Serves versions that are streamed into an engine: its own memory is the base of deltas, and no
second copy of the weights is kept.

A served element is the checkpoint's, times factors, in the type of the layers. Where that can be
undone bit for bit the checkpoint's element is read from the served memory: 16-bit elements in fp32
(their products with a factor keep 24 bits, so the quotient rounds to the same 16), and any element
without a factor in a type that holds it. Other tensors are kept as they came: norms, and in layers
of 16 bits the matrices whose norm or scale is multiplied in.

Elements are read, decoded, served and compared a segment at a time.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.producers.engines.queue import EngineWeights
from rollstream.producers.engines.torch.weights import (
    FILL_COLUMNS,
    Indices,
    ServedWeights,
    TensorWrite,
    WeightView,
    bits_of_elements,
)
from rollstream.storage.weights.delta.coding import Bits, element_of
from rollstream.storage.weights.delta.sparse import segments
from rollstream.storage.weights.manifest import Manifest, TensorEntry
from rollstream.storage.weights.streamed import ReadElements, StreamedTensors, TensorPart, WrongBase
from rollstream.storage.weights.tensors import DTYPES, tensor_bytes, tensor_hasher

WRITES_BYTES = 64 << 20
"""Most bytes of writes that are made ready beside decoding. A larger update is decoded once more
while decoding pauses.
"""


@dataclass(frozen=True, slots=True)
class StreamedWrites:
    """An update whose every tensor was verified against its hash. `writes` are all of its writes;
    None: they are too large, and decoded again. `norms` are the new tensors without served memory.
    """

    writes: tuple[TensorWrite, ...] | None
    norms: Mapping[str, Tensor]


@dataclass(slots=True)
class StreamedWeights:
    """The weights of one engine, by `served`'s views. `kept` are the tensors that cannot be read
    back from the served memory, by the engine's names. One thread at a time uses it, except that
    `prepare` and `compare`, which change nothing, may run beside decoding.
    """

    served: ServedWeights
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    manifest: Manifest | None = None
    """That of the served version; None during a load and after a failed one."""

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        """The update with `prepared` set, after all of its tensors were decoded from the served
        ones and compared with their hashes. Raises `WrongBase`, which names all tensors that differ
        from theirs, and `EngineRefused`, which names a tensor that the model cannot serve.
        """
        return replace(update, prepared=_Pass(self, _streamed(update)).collect())

    def load(self, update: WeightUpdate) -> None:
        """Serve the update. After an error no version is held."""
        prepared, tensors = update.prepared, _streamed(update)
        if not isinstance(prepared, StreamedWrites):
            prepared = _Pass(self, tensors).collect()
        held = self.served.held
        if tensors.base is not None and (self.manifest is None or tensors.base != held):
            raise EngineRefused(
                f"weights: version {update.version} was decoded for an engine that serves "
                f"{tensors.base}, this one serves {held or 'no version'}"
            )
        kept, self.manifest, self.served.held = self.kept, None, None
        if prepared.writes is None:
            kept = _Pass(self, tensors).write(prepared.norms)
        for write in prepared.writes or ():
            write.write()
        self.kept = {**kept, **prepared.norms}
        self.manifest, self.served.held = tensors.manifest, update.version

    def compare(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> WeightComparison:
        """Compare the served tensors with the hashes of the served version: what is read from them
        has the manifest's hash, and serving that again gives the same bits.
        """
        assert isinstance(tensors, StreamedTensors), "a streamed engine is given streamed versions"
        own = {name: self.stored(name, tensors) for name in self.served.shapes}
        by_stored = {stored: name for name, (stored, _) in own.items()}
        owner = tensors.manifest.weights.owner
        asked = {by_stored[owner(name)] for name in names if owner(name) in by_stored}
        differing = [name for name in sorted(asked) if not self._is_served(name, own[name][1])]
        return WeightComparison(len(asked), tuple(differing))

    def stored(self, name: str, tensors: StreamedTensors) -> tuple[str, TensorEntry]:
        """The name and the entry of the tensor `name` of this engine in a version."""
        weights = tensors.manifest.weights
        held = weights.owner(self.served.held_as(name, tensors))
        if held not in weights.tensors:
            raise EngineRefused(f"weights: tensor {name!r} is missing")
        return held, weights.tensors[held]

    def reader(self, name: str, dtype: str) -> ReadElements:
        """Reads the checkpoint's elements of a served tensor."""
        kept, element = self.kept.get(name), element_of(dtype)
        view = None if kept is not None else self.exact_view(name, dtype, self.kept)

        def read(begin: int, end: int) -> Bits:
            if view is None:
                part = torch.empty(0) if kept is None else kept.view(-1)[begin:end].clone()
            else:
                part = _read(view, begin, end, DTYPES[dtype], view.factor(self.kept))
            return np.frombuffer(tensor_bytes(part), element.bits)

        return read

    def exact_view(self, name: str, dtype: str, norms: Mapping[str, Tensor]) -> WeightView | None:
        """A view from which the tensor can be read bit for bit; None if it must be kept."""
        for view in self.served.views.get(name, ()):
            if _is_exact(view, DTYPES[dtype], norms):
                return view
        return None

    def _is_served(self, name: str, entry: TensorEntry) -> bool:
        read, hasher = self.reader(name, entry.dtype), tensor_hasher(entry.dtype, entry.shape)
        views = [(view, view.factor(self.kept)) for view in self.served.views.get(name, ())]
        for at in segments(prod(entry.shape)):
            values = read(at.start, at.stop)
            hasher.update(values.view(np.uint8).data)
            part = _tensor(values, entry.dtype)
            for view, factor in views:
                if not _is_same(view, at.start, part, factor):
                    return False
        return hasher.hexdigest() == entry.hash


def open_weights(served: ServedWeights, tensors: Mapping[str, Tensor]) -> EngineWeights:
    """Serve these tensors; returns what updates them: by streams, if the first version is one."""
    if not isinstance(tensors, StreamedTensors):
        served.fill(tensors)
        return served
    weights = StreamedWeights(served)
    weights.load(WeightUpdate(tensors.manifest.version, tensors))
    return weights


class _Pass:
    """One pass over a version's tensors, decoded from those that the engine serves."""

    def __init__(self, weights: StreamedWeights, tensors: StreamedTensors) -> None:
        self._weights, self._tensors = weights, tensors
        served = weights.served
        self._own = {name: weights.stored(name, tensors) for name in served.shapes}
        for name, (_, entry) in self._own.items():
            if entry.shape != served.shapes[name]:
                raise EngineRefused(
                    f"weights: tensor {name!r} has shape {entry.shape}, the model needs "
                    f"{served.shapes[name]}"
                )
        self._room = WRITES_BYTES

    def collect(self) -> StreamedWrites:
        """Verify all tensors and collect their writes while there is room; writes nothing."""
        wrong: set[str] = set()
        norms: dict[str, Tensor] = {}
        for name in self._own.keys() - self._weights.served.views.keys():
            try:
                norms[name] = self._norm(name)
            except WrongBase as error:
                wrong |= error.names
        writes: list[TensorWrite] = []
        for name in () if wrong else self._weights.served.views:
            columns = self._changed_columns(name, norms)
            if not self._is_touched(name, columns):
                continue
            if self._is_rewritten(name, norms, columns):
                self._room = -1
            try:
                for part in self._parts(name):
                    writes += self._writes(name, part, columns, norms)
            except WrongBase as error:
                wrong |= error.names
            if self._room < 0:
                writes.clear()
        if wrong:
            raise WrongBase(wrong, self._tensors.manifest.version)
        return StreamedWrites(tuple(writes) if self._room >= 0 else None, norms)

    def write(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write all tensors in place; returns those to keep beside the norms. An error leaves a
        mixture of two versions.
        """
        kept: dict[str, Tensor] = {}
        for name, views in self._weights.served.views.items():
            _, entry = self._own[name]
            own = self._weights.kept.get(name)
            is_kept = self._weights.exact_view(name, entry.dtype, norms) is None
            if is_kept:
                fresh = torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) if own is None else own
                kept[name] = fresh
            is_moved = is_kept != (own is not None)
            if not is_moved and not self._is_touched(name, self._changed_columns(name, norms)):
                continue
            factors = [view.factor(norms) for view in views]
            for part in self._parts(name):
                values = _tensor(part.values, entry.dtype)
                for view, factor in zip(views, factors, strict=True):
                    _write(view, part.begin, values, factor)
                if name in kept:
                    kept[name].view(-1)[part.begin : part.begin + len(values)] = values
        return kept

    def _parts(self, name: str) -> Iterator[TensorPart]:
        """The parts of a tensor; raises `EngineRefused` for values that are not finite."""
        stored, entry = self._own[name]
        base = None if self._tensors.base is None else self._weights.reader(name, entry.dtype)
        for part in self._tensors.parts(stored, base):
            values = _tensor(part.values, entry.dtype)
            if values.is_floating_point() and not bool(values.isfinite().all()):
                raise EngineRefused(f"weights: tensor {name!r} holds values that are not finite")
            yield part

    def _norm(self, name: str) -> Tensor:
        """A tensor without served memory: it is small, and kept."""
        _, entry = self._own[name]
        found = torch.empty(prod(entry.shape), dtype=DTYPES[entry.dtype])
        for part in self._parts(name):
            found[part.begin : part.begin + len(part.values)] = _tensor(part.values, entry.dtype)
        return found.view(entry.shape)

    def _changed_columns(self, name: str, norms: Mapping[str, Tensor]) -> Indices:
        """The columns of a matrix whose factor changes."""
        found = [
            np.flatnonzero((bits_of_elements(norms[view.norm]) != bits_of_elements(before)).numpy())
            for view in self._weights.served.views[name]
            if view.norm is not None and (before := self._weights.kept.get(view.norm)) is not None
        ]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def _is_touched(self, name: str, columns: Indices) -> bool:
        return self._tensors.differs(self._own[name][0]) or len(columns) > 0

    def _is_rewritten(self, name: str, norms: Mapping[str, Tensor], columns: Indices) -> bool:
        """Whether all of a tensor is written: many columns change, or it is kept from now on, or no
        longer.
        """
        _, entry = self._own[name]
        is_kept = self._weights.exact_view(name, entry.dtype, norms) is None
        is_wide = len(columns) > 0 and len(columns) * FILL_COLUMNS >= entry.shape[-1]
        return is_wide or is_kept != (name in self._weights.kept)

    def _writes(
        self, name: str, part: TensorPart, columns: Indices, norms: Mapping[str, Tensor]
    ) -> list[TensorWrite]:
        """The writes of one part, while there is room."""
        views, kept = self._weights.served.views[name], self._weights.kept.get(name)
        targets = [view.view for view in views] + ([] if kept is None else [kept])
        element_bytes = sum(8 + target.element_size() for target in targets)
        count = len(part.values) if part.changed is None else len(part.changed)
        if count * element_bytes > self._room:
            self._room = -1
            return []
        changed = np.arange(count) if part.changed is None else part.changed
        if len(columns):
            changed = np.union1d(changed, _in_columns(part, columns, self._own[name][1].shape[-1]))
        self._room -= len(changed) * element_bytes
        if self._room < 0 or not len(changed):
            return []
        values = _tensor(part.values[changed], self._own[name][1].dtype)
        indices = changed + part.begin
        found: list[TensorWrite] = []
        for view in views:
            factor = view.factor(norms)
            if factor is not None:
                factor = factor[_device_indices(indices % len(factor), factor)]
            positions = _device_indices(view.positions(indices), view.view)
            found.append(TensorWrite(view.flat, view.served(values, factor), positions))
        if kept is not None:
            found.append(TensorWrite(kept.view(-1), values, _device_indices(indices, kept)))
        return found


def _streamed(update: WeightUpdate) -> StreamedTensors:
    assert isinstance(update.tensors, StreamedTensors), "a streamed engine takes streamed versions"
    return update.tensors


def _tensor(values: Bits, dtype: str) -> Tensor:
    """Bits as a tensor of this dtype, sharing their memory."""
    return torch.from_numpy(values.view(np.uint8)).view(DTYPES[dtype])  # pyright: ignore[reportUnknownMemberType]


def _device_indices(indices: Indices, beside: Tensor) -> Tensor:
    return torch.from_numpy(indices).to(beside.device)  # pyright: ignore[reportUnknownMemberType]


def _in_columns(part: TensorPart, columns: Indices, width: int) -> Indices:
    """The positions within a part of these columns of a matrix."""
    end = part.begin + len(part.values)
    rows = np.arange(part.begin // width, -(-end // width), dtype=np.int64)
    found = (rows[:, None] * width + columns).reshape(-1) - part.begin
    return found[(found >= 0) & (found < len(part.values))]


def _is_exact(view: WeightView, dtype: torch.dtype, norms: Mapping[str, Tensor]) -> bool:
    """Whether elements of `dtype` can be read from the view bit for bit."""
    short = dtype in (torch.bfloat16, torch.float16)
    if view.scale is None and view.norm is None:
        return view.view.dtype == dtype or (short and view.view.dtype == torch.float32)
    factor = view.factor(norms)
    usable = factor is None or bool((factor.isfinite() & (factor != 0)).all())
    return short and view.view.dtype == torch.float32 and usable


def _blocks(view: Tensor, begin: int, end: int) -> Iterator[Tensor]:
    """Views of elements `[begin, end)` in row-major order: whole rows, or one dimension."""
    if view.ndim <= 1:
        yield view.reshape(-1)[begin:end]
        return
    size = view[0].numel()
    first, last = begin // size, end // size
    if begin % size:
        yield from _blocks(view[first], begin % size, min(end - first * size, size))
        first += 1
    if first < last:
        yield view[first:last]
    if end % size and first <= last:
        yield from _blocks(view[last], 0, end % size)


def _placed(
    view: WeightView, begin: int, count: int, factor: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """The blocks of `count` elements from `begin` on: which of them each has, the block, and the
    factors of its columns.
    """
    at = 0
    for block in _blocks(view.view, begin, begin + count):
        columns = factor
        if factor is not None and block.ndim == 1:
            column = (begin + at) % len(factor)
            columns = factor[column : column + len(block)]
        yield slice(at, at + block.numel()), block, columns
        at += block.numel()


def _read(
    view: WeightView, begin: int, end: int, dtype: torch.dtype, factor: Tensor | None
) -> Tensor:
    """The checkpoint's elements `[begin, end)`, contiguous."""
    found = torch.empty(end - begin, dtype=dtype, device=view.view.device)
    for own, block, columns in _placed(view, begin, end - begin, factor):
        exact = block
        if columns is not None:
            exact = exact / columns
        if view.scale is not None:
            exact = exact / view.scale
        found[own].view(block.shape).copy_(exact)
    return found


def _write(view: WeightView, begin: int, values: Tensor, factor: Tensor | None) -> None:
    for own, block, columns in _placed(view, begin, len(values), factor):
        block.copy_(view.served(values[own].view(block.shape), columns))


def _is_same(view: WeightView, begin: int, values: Tensor, factor: Tensor | None) -> bool:
    """Whether the view serves these elements, bit for bit."""
    return all(
        torch.equal(
            bits_of_elements(block),
            bits_of_elements(view.served(values[own].view(block.shape), columns)),
        )
        for own, block, columns in _placed(view, begin, len(values), factor)
    )
