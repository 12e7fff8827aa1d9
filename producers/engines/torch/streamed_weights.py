"""Updates an engine whose own memory is the base of deltas, so that no second copy of the weights
is kept (docs/explanation/weights.md).
"""

import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import IO

import numpy as np
import torch
from torch import Tensor

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.producers.engines.queue import EngineWeights
from rollstream.producers.engines.torch.view_elements import (
    is_exact,
    is_finite,
    read_elements,
    serves_elements,
    write_elements,
)
from rollstream.producers.engines.torch.weights import (
    Indices,
    ServedWeights,
    TensorWrite,
    WeightView,
    bits_of_elements,
    check_unexpected,
)
from rollstream.storage.weights.delta.coding import Bits, element_of
from rollstream.storage.weights.delta.sparse import segments
from rollstream.storage.weights.manifest import Manifest, TensorEntry
from rollstream.storage.weights.streamed import ReadElements, StreamedTensors, TensorPart, WrongBase
from rollstream.storage.weights.tensors import DTYPES, tensor_bytes, tensor_hasher

ALIGNMENT = 64  # each array in a file begins at a multiple of so many bytes
PATCH_SHARE = 6
"""A part is written whole if more than 1 in this many of its elements changed: all elements then
take less room than the changed ones with their positions.
"""


@dataclass(frozen=True, slots=True)
class PartWrite:
    """Writes `values` from position `begin` on into each view, times the factors beside it, one per
    column, and unchanged into `kept`, the engine's copy.
    """

    views: Sequence[tuple[WeightView, Tensor | None]]
    kept: Tensor | None
    begin: int
    values: Tensor

    def write(self) -> None:
        for view, factor in self.views:
            write_elements(view, self.begin, self.values, factor)
        if self.kept is not None:
            self.kept.view(-1)[self.begin : self.begin + len(self.values)] = self.values


@dataclass(frozen=True, slots=True)
class StreamedWrites:
    """A prepared update: the `writes`, with their values in files; the new tensors without served
    memory (`norms`); and those that cannot be read back bit for bit (`kept`).
    """

    writes: tuple[TensorWrite | PartWrite, ...]
    norms: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]


@dataclass(slots=True)
class StreamedWeights:
    """One thread at a time uses an instance; `prepare` and `compare` may run beside decoding."""

    served: ServedWeights
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    manifest: Manifest | None = None
    """The served version's manifest; None during a load and after a failed one."""

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        """Prepares an update; the served weights do not change. Raises `WrongBase` for tensors
        without their hashes after their deltas, and `EngineRefused` for one that the model cannot
        serve.
        """
        return replace(update, prepared=_Pass(self, _streamed(update)).collect())

    def load(self, update: WeightUpdate) -> None:
        """Raises `EngineRefused` if it was prepared for another served version. After an error
        during the writes no version is held.
        """
        prepared, tensors = update.prepared, _streamed(update)
        if not isinstance(prepared, StreamedWrites):
            prepared = _Pass(self, tensors).collect()
        served_version = self.served.held
        if tensors.base is not None and (self.manifest is None or tensors.base != served_version):
            raise EngineRefused(
                f"weights: version {update.version} was decoded for an engine that serves "
                f"{tensors.base}, this one serves {served_version or 'no version'}"
            )
        self.manifest = self.served.held = None
        for write in prepared.writes:
            write.write()
        self.kept = {**prepared.kept, **prepared.norms}
        self.manifest, self.served.held = tensors.manifest, update.version

    def compare(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> WeightComparison:
        """Compares tensors: one is the same if its elements, read back, have the manifest's hash,
        and serving them again gives the served bits.
        """
        assert isinstance(tensors, StreamedTensors), "a streamed engine is given streamed versions"
        entries = {name: self.stored(name, tensors) for name in self.served.shapes}
        by_stored = {stored: name for name, (stored, _) in entries.items()}
        owner = tensors.manifest.weights.owner
        served_names = {by_stored[owner(name)] for name in names if owner(name) in by_stored}
        differing = [
            name for name in sorted(served_names) if not self._is_served(name, entries[name][1])
        ]
        return WeightComparison(len(served_names), tuple(differing))

    def stored(self, name: str, tensors: StreamedTensors) -> tuple[str, TensorEntry]:
        """Returns the name under which the version stores the tensor, and its entry. Raises
        `EngineRefused` if the version lacks it.
        """
        weights = tensors.manifest.weights
        stored_name = weights.owner(self.served.held_as(name, tensors))
        if stored_name not in weights.tensors:
            raise EngineRefused(f"weights: tensor {name!r} is missing")
        return stored_name, weights.tensors[stored_name]

    def reader(self, name: str, dtype: str) -> ReadElements:
        """Returns a reader of ranges as the checkpoint's elements, from the engine's copy or the
        served memory.
        """
        copy, element = self.kept.get(name), element_of(dtype)
        view = None if copy is not None else self.exact_view(name, dtype, self.kept)

        def read(begin: int, end: int) -> Bits:
            if view is not None:
                part = read_elements(view, begin, end, DTYPES[dtype], view.factor(self.kept))
            else:
                assert copy is not None, "what cannot be read back is kept"
                part = copy.view(-1)[begin:end].clone()
            return np.frombuffer(tensor_bytes(part), element.bits)

        return read

    def exact_view(self, name: str, dtype: str, norms: Mapping[str, Tensor]) -> WeightView | None:
        """Returns a view from which the tensor can be read bit for bit; None if the engine must
        keep a copy: of norms, and in 16-bit layers of the matrices into which a norm or a scale is
        multiplied.
        """
        for view in self.served.views.get(name, ()):
            if is_exact(view, DTYPES[dtype], norms):
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
                if not serves_elements(view, at.start, part, factor):
                    return False
        return hasher.hexdigest() == entry.hash


def open_weights(served: ServedWeights, tensors: Mapping[str, Tensor]) -> EngineWeights:
    """Serve the first version; if it is streamed, all later ones must be."""
    if not isinstance(tensors, StreamedTensors):
        served.fill(tensors)
        return served
    weights = StreamedWeights(served)
    weights.load(WeightUpdate(tensors.manifest.version, tensors))
    return weights


class _WriteFile:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._writes: list[Callable[[mmap.mmap], TensorWrite | PartWrite]] = []

    def add(self, write: Callable[..., TensorWrite | PartWrite], *arrays: Tensor) -> None:
        places: list[tuple[torch.dtype, int, int]] = []
        for array in arrays:
            # In a file, so the arrays take no memory of the process.
            begin = self._file.seek(-(-self._file.tell() // ALIGNMENT) * ALIGNMENT)
            self._file.write(tensor_bytes(array))
            places.append((array.dtype, len(array), begin))

        def mapped(file: mmap.mmap) -> TensorWrite | PartWrite:
            return write(
                *(torch.frombuffer(file, dtype=d, count=n, offset=at) for d, n, at in places)
            )

        self._writes.append(mapped)

    def add_mapped(self, write: PartWrite) -> None:
        # Its values are in a file already.
        self._writes.append(lambda _: write)

    def writes(self) -> tuple[TensorWrite | PartWrite, ...]:
        self._file.write(bytes(1))  # an empty file cannot be mapped
        self._file.flush()
        # The mapping stays when the caller closes the file.
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        return tuple(write(mapped) for write in self._writes)


class _Pass:
    # One pass over a version's tensors, a part of a tensor at a time.
    def __init__(self, weights: StreamedWeights, tensors: StreamedTensors) -> None:
        self._weights, self._tensors = weights, tensors
        served = weights.served
        self._own = {name: weights.stored(name, tensors) for name in served.shapes}
        expected = {stored for stored, _ in self._own.values()}
        check_unexpected(expected, tensors.manifest.weights.tensors)
        for name, (_, entry) in self._own.items():
            if entry.shape != served.shapes[name]:
                raise EngineRefused(
                    f"weights: tensor {name!r} has shape {entry.shape}, the model needs "
                    f"{served.shapes[name]}"
                )

    def collect(self) -> StreamedWrites:
        wrong: set[str] = set()
        norms: dict[str, Tensor] = {}
        # Norms come first: they are factors of the other tensors. They are small, so they are kept.
        for name in self._own.keys() - self._weights.served.views.keys():
            try:
                norms[name] = self._norm(name)
            except WrongBase as error:
                wrong |= error.names
        if wrong:
            raise WrongBase(wrong, self._tensors.manifest.version)
        copies: dict[str, Tensor] = {}
        with tempfile.TemporaryFile(prefix="rollstream-writes-") as opened:
            file = _WriteFile(opened)
            for name in self._weights.served.views:
                if (copy := self._kept_from_now(name, norms)) is not None:
                    copies[name] = copy
                try:
                    self._collect_tensor(file, name, norms, copy)
                except WrongBase as error:
                    wrong |= error.names
            if wrong:
                raise WrongBase(wrong, self._tensors.manifest.version)
            return StreamedWrites(file.writes(), norms, copies)

    def _kept_from_now(self, name: str, norms: Mapping[str, Tensor]) -> Tensor | None:
        _, entry = self._own[name]
        if self._weights.exact_view(name, entry.dtype, norms) is not None:
            return None
        copy = self._weights.kept.get(name)
        # A write fills new memory.
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) if copy is None else copy

    def _collect_tensor(
        self, file: _WriteFile, name: str, norms: Mapping[str, Tensor], copy: Tensor | None
    ) -> None:
        columns, (stored, entry) = self._changed_columns(name, norms), self._own[name]
        # A matrix changes with the norm before it: its served elements are multiplied by the
        # norm's.
        if not (self._tensors.differs(stored) or len(columns)):
            return
        views = [(view, view.factor(norms)) for view in self._weights.served.views[name]]
        is_new = copy is not None and name not in self._weights.kept
        for part in self._parts(name):
            values, changed = _tensor(part.values, entry.dtype), part.changed
            if changed is not None and len(columns):
                changed = np.union1d(changed, _in_columns(part, columns, entry.shape[-1]))
            if is_new or changed is None or len(changed) * PATCH_SHARE > len(values):
                if part.is_mapped:
                    file.add_mapped(PartWrite(views, copy, part.begin, values))
                else:
                    file.add(partial(PartWrite, views, copy, part.begin), values)
            elif len(changed):
                _add_patches(
                    file,
                    views,
                    copy,
                    changed + part.begin,
                    values[_device_indices(changed, values)],
                )

    def _parts(self, name: str) -> Iterator[TensorPart]:
        stored, entry = self._own[name]
        base = None if self._tensors.base is None else self._weights.reader(name, entry.dtype)
        for part in self._tensors.parts(stored, base):
            values = _tensor(part.values, entry.dtype)
            if not is_finite(values):
                raise EngineRefused(f"weights: tensor {name!r} holds values that are not finite")
            yield part

    def _norm(self, name: str) -> Tensor:
        _, entry = self._own[name]
        norm = torch.empty(prod(entry.shape), dtype=DTYPES[entry.dtype])
        for part in self._parts(name):
            norm[part.begin : part.begin + len(part.values)] = _tensor(part.values, entry.dtype)
        return norm.view(entry.shape)

    def _changed_columns(self, name: str, norms: Mapping[str, Tensor]) -> Indices:
        columns = [
            np.flatnonzero((bits_of_elements(norms[view.norm]) != bits_of_elements(before)).numpy())
            for view in self._weights.served.views[name]
            if view.norm is not None and (before := self._weights.kept.get(view.norm)) is not None
        ]
        return np.unique(np.concatenate(columns)) if columns else np.zeros(0, np.int64)


def _add_patches(
    file: _WriteFile,
    views: Sequence[tuple[WeightView, Tensor | None]],
    copy: Tensor | None,
    indices: Indices,
    values: Tensor,
) -> None:
    for view, factor in views:
        if factor is not None:
            factor = factor[_device_indices(indices % len(factor), factor)]
        positions = torch.from_numpy(view.positions(indices))  # pyright: ignore[reportUnknownMemberType]
        # `values` are the checkpoint's elements at `indices`.
        served = view.served(values, factor).cpu()
        file.add(partial(TensorWrite, view.flat), served, positions)
    if copy is not None:
        file.add(partial(TensorWrite, copy.view(-1)), values, torch.from_numpy(indices))  # pyright: ignore[reportUnknownMemberType]


def _streamed(update: WeightUpdate) -> StreamedTensors:
    assert isinstance(update.tensors, StreamedTensors), "a streamed engine takes streamed versions"
    return update.tensors


def _tensor(values: Bits, dtype: str) -> Tensor:
    return torch.from_numpy(values.view(np.uint8)).view(DTYPES[dtype])  # pyright: ignore[reportUnknownMemberType]


def _device_indices(indices: Indices, beside: Tensor) -> Tensor:
    return torch.from_numpy(indices).to(beside.device)  # pyright: ignore[reportUnknownMemberType]


def _in_columns(part: TensorPart, columns: Indices, width: int) -> Indices:
    end = part.begin + len(part.values)
    rows = np.arange(part.begin // width, -(-end // width), dtype=np.int64)
    positions = (rows[:, None] * width + columns).reshape(-1) - part.begin
    return positions[(positions >= 0) & (positions < len(part.values))]
