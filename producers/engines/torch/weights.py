"""The weights that an engine serves, in the memory from which it decodes. `prepare` checks an
update and computes the changed elements beside decoding; `load` writes them between two decode
steps: a wrong update is refused before anything is written.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.storage.settings import MEMORY_FILE_BYTES
from rollstream.storage.weights.mapped import ScratchTensors, patch_bytes
from rollstream.storage.weights.resident import TensorPatch
from rollstream.storage.weights.tensors import untie
from rollstream.streams.values import Version

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WeightView:
    """One checkpoint tensor's place in the served memory: `view` is a strided view of any shape, in
    row-major order the checkpoint tensor's.

    A served element is the checkpoint's element times `scale`, times the factor of its column: the
    column's weight in the norm tensor named `norm`, times the root of the number of columns. Every
    element goes through the same operations in fp32, whether its whole tensor is loaded or it alone
    is patched, so both give the same bits.
    """

    view: Tensor
    scale: float | None = None
    norm: str | None = None

    def served(self, values: Tensor, factor: Tensor | None) -> Tensor:
        values = values.to(self.view.device)
        if self.scale is None and factor is None:
            return values.to(self.view.dtype)
        exact = values.float()
        if self.scale is not None:
            exact = exact * self.scale
        if factor is not None:
            exact = exact * factor
        return exact.to(self.view.dtype)

    def factor(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if self.norm is None:
            return None
        norm = tensors[self.norm]
        return norm.to(self.view.device).float() * norm.numel() ** 0.5

    def fill(self, tensor: Tensor, factor: Tensor | None) -> None:
        """Write all elements of the checkpoint's `tensor`."""
        for served, rows in self.parts(tensor):
            served.copy_(self.served(rows, factor))

    def parts(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the served memory and the checkpoint's `tensor` in the same parts, about
        `PART_ELEMENTS` each, so that the arithmetic needs little memory.
        """
        shaped = tensor.view(self.view.shape)
        rows = max(1, PART_ELEMENTS * len(shaped) // max(1, shaped.numel()))
        for begin in range(0, len(shaped), rows):
            yield self.view[begin : begin + rows], shaped[begin : begin + rows]

    def positions(self, indices: Indices) -> Indices:
        """Returns positions in `flat` of the elements with these indices in the checkpoint
        tensor.
        """
        rest, positions = indices, np.full(len(indices), self.view.storage_offset(), np.int64)
        dimensions = _merged(self.view)
        for size, stride in dimensions[:0:-1]:
            rest, at = np.divmod(rest, size)
            positions += at * stride
        return positions + rest * dimensions[0][1]

    @property
    def flat(self) -> Tensor:
        """The whole storage of `view`, other tensors' elements included, as one dimension."""
        storage = self.view.untyped_storage()
        elements = storage.nbytes() // self.view.element_size()
        return torch.empty(0, dtype=self.view.dtype, device=self.view.device).set_(
            storage, 0, (elements,), (1,)
        )


def _merged(view: Tensor) -> list[tuple[int, int]]:
    dimensions: list[tuple[int, int]] = [(1, 0)]
    for size, stride in zip(view.shape, view.stride(), strict=True):
        outer, step = dimensions[-1]
        # Contiguous neighbours are joined.
        if outer == 1 or step == size * stride:
            dimensions[-1] = (outer * size, stride)
        else:
            dimensions.append((size, stride))
    return dimensions


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    finite: Container[str] | None = None,
) -> None:
    """Raise `EngineRefused` for a tensor that is missing, has a wrong shape or, if named in
    `finite` (None: all), is not finite.
    """
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise EngineRefused(f"weights: tensor {name!r} is missing")
        if tuple(tensor.shape) != shape:
            raise EngineRefused(
                f"weights: tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {shape}"
            )
        if finite is None or name in finite:
            _check_finite(name, tensor)


def check_unexpected(expected: Collection[str], stored: Iterable[str]) -> None:
    """Raise `EngineRefused` for a tensor beside the `expected` ones (tied tensors are stored
    once).
    """
    for name in stored:
        if name not in expected:
            # The engine would serve another model than the trainer trains, with a head of its own
            # where the configuration ties it to the embedding.
            raise EngineRefused(
                f"weights: the version has a tensor {name!r} that this model does not have; its "
                "config.json is of another model, or ties what the version has twice "
                "(tie_word_embeddings)"
            )


def check_patch(name: str, patch: TensorPatch, shape: tuple[int, ...]) -> None:
    """Raise `EngineRefused` for a wrong shape, an index beyond the tensor, or values that are not
    finite.
    """
    if tuple(patch.shape) != shape:
        raise EngineRefused(
            f"weights: the patch of {name!r} is for shape {tuple(patch.shape)}, "
            f"the model needs {shape}"
        )
    indices = np.asarray(patch.indices)
    if len(indices) != len(patch.values):
        raise EngineRefused(
            f"weights: the patch of {name!r} has {len(indices)} indices "
            f"and {len(patch.values)} values"
        )
    elements = int(np.prod(shape))
    if len(indices) and not (indices.min() >= 0 and indices.max() < elements):
        raise EngineRefused(
            f"weights: the patch of {name!r} reaches beyond its {elements} elements"
        )
    _check_finite(name, patch.values)


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        return
    flat = tensor.reshape(-1)
    begins = range(0, len(flat), PART_ELEMENTS)
    if not all(bool(flat[i : i + PART_ELEMENTS].isfinite().all()) for i in begins):
        raise EngineRefused(f"weights: tensor {name!r} holds values that are not finite")


PART_ELEMENTS = 1 << 19  # computed or compared at once: 2 MiB in fp32
FILL_COLUMNS = 8  # if 1 in this many elements of a norm changed, the matrix after it is rewritten
NORM_ROWS = 16  # a norm is compared in this many rows of the smallest matrix that it multiplies
PATCH_SHARE = 6  # if 1 in this many elements of a tensor changed, it is written whole


@dataclass(frozen=True, slots=True)
class WholeWrite:
    """Writes all elements of a tensor, which the rollout holds until the next update."""

    view: WeightView
    tensor: Tensor
    factor: Tensor | None

    def write(self) -> None:
        self.view.fill(self.tensor, self.factor)

    def collect(self) -> "CopyWrite":
        """Compute the served values beside decoding, in the order of the served memory."""
        view = self.view.view
        order = sorted(range(view.ndim), key=lambda i: -view.stride(i))
        values = self.view.served(self.tensor, self.factor).view(view.shape)
        return CopyWrite(view.permute(order), values.permute(order).contiguous())


@dataclass(frozen=True, slots=True)
class CopyWrite:
    """Copies a whole tensor's served values."""

    target: Tensor
    values: Tensor

    def write(self) -> None:
        self.target.copy_(self.values)


@dataclass(frozen=True, slots=True)
class ElementsWrite:
    """Changes the elements `indices` of the flat checkpoint tensor to `values`, with the factor of
    each column. `collect` computes the served bits beside decoding, into `room`.
    """

    view: WeightView
    indices: Indices
    values: Tensor
    factor: Tensor | None

    @property
    def bytes(self) -> int:
        return patch_bytes(len(self.indices), self.view.view.dtype)

    def collect(self, room: ScratchTensors) -> "CollectedWrite":
        positions, served = room.patch(len(self.indices), self.view.view.dtype)
        for begin in range(0, len(self.indices), PART_ELEMENTS):
            part = slice(begin, begin + PART_ELEMENTS)
            indices, factor = self.indices[part], self.factor
            if factor is not None:
                columns = torch.from_numpy(indices % len(factor))  # pyright: ignore[reportUnknownMemberType]
                factor = factor.index_select(0, columns.to(factor.device))
            positions[part] = torch.from_numpy(self.view.positions(indices))  # pyright: ignore[reportUnknownMemberType]
            served[part] = self.view.served(self.values[part], factor)
        return CollectedWrite(self.view.flat, positions, served)


@dataclass(frozen=True, slots=True)
class CollectedWrite:
    """Writes the served `values` at `positions` of an engine's memory."""

    target: Tensor
    positions: Tensor
    values: Tensor

    def write(self) -> None:
        device = self.target.device
        self.target.index_copy_(0, self.positions.to(device), self.values.to(device))


@dataclass(frozen=True, slots=True)
class PreparedWrites:
    """A checked update: `writes` turn the weights of `base` into its own; None: load all
    tensors.
    """

    base: Version | None
    writes: tuple[WholeWrite | CopyWrite | CollectedWrite, ...] | None


@dataclass(slots=True)
class _NormChange:
    # None: all. Each is a column of the matrix after the norm, whose served elements change too.
    columns: Indices | None


@dataclass(slots=True)
class ServedWeights:
    """`views` maps a checkpoint name to the places that the tensor fills, except a norm that is
    multiplied into the matrix after it. `tied` has the other names under which a checkpoint may
    hold a tensor. `held` is the version that is completely served; None during a load and after a
    failed one.
    """

    views: Mapping[str, tuple[WeightView, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    held: Version | None = None

    def fill(self, tensors: Mapping[str, Tensor], checked: bool = False) -> None:
        """Write all tensors. Unless they are `checked` already, raises `EngineRefused`, which names
        a wrong tensor, before anything is written.
        """
        by_name = self._by_expected_name(tensors)
        if not checked:
            self._check_names(tensors)
            check_tensors(self.shapes, by_name)
        for name, views in self.views.items():
            for view in views:
                view.fill(by_name[name], view.factor(by_name))

    def plan(self, update: WeightUpdate) -> PreparedWrites:
        """Check an update and compute its writes, without writing. Raises `EngineRefused`, which
        names the fault.
        """
        by_name = self._by_expected_name(update.tensors)
        self._check_names(update.tensors)
        if update.patches is None:
            check_tensors(self.shapes, by_name)
            return PreparedWrites(None, None)
        patches, whole_names = self._changes_by_name(update)
        check_tensors(self.shapes, by_name, finite=whole_names)
        for name, patch in patches.items():
            check_patch(name, patch, self.shapes[name])
        norms = {
            name: _NormChange(None if name in whole_names else np.asarray(patches[name].indices))
            for name in (*patches, *whole_names)
            if name not in self.views
        }
        writes: list[WholeWrite | ElementsWrite] = []
        for name, views in self.views.items():
            patch, tensor = patches.get(name), by_name[name]
            for view in views:
                norm_change, factor = norms.get(view.norm or ""), view.factor(by_name)
                if name in whole_names or (norm_change and _is_wide(norm_change, tensor)):
                    writes.append(WholeWrite(view, tensor, factor))
                    continue
                if patch is not None and len(patch.values):
                    indices = np.asarray(patch.indices)
                    writes.append(ElementsWrite(view, indices, patch.values, factor))
                if norm_change is not None:
                    writes.append(_columns(view, norm_change, tensor, factor))
        # In a file, because the changes of a large version may be larger than its weights.
        room = ScratchTensors(sum(w.bytes for w in writes if isinstance(w, ElementsWrite)))
        whole_bytes = sum(w.view.view.nbytes for w in writes if isinstance(w, WholeWrite))
        collected: list[WholeWrite | CopyWrite | CollectedWrite] = []
        for write in writes:
            if isinstance(write, ElementsWrite):
                collected.append(write.collect(room))
            else:
                # A shorter pause, where a second copy takes little memory.
                is_small = whole_bytes <= MEMORY_FILE_BYTES
                collected.append(write.collect() if is_small else write)
        return PreparedWrites(update.base, tuple(collected))

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        """Checks the update. Served memory is not written, so the call may run beside decoding.
        Raises `EngineRefused` as `plan` does.
        """
        if update.base is None or update.base != self.held:
            # Patches of another base are useless: `load` loads all tensors.
            update = replace(update, base=None, patches=None)
        return replace(update, prepared=self.plan(update))

    def load(self, update: WeightUpdate) -> None:
        """Serve an update: its prepared writes if their base is still held, else all tensors. After
        an error during the writes the weights are a mixture, and `held` is None.
        """
        if not isinstance(update.prepared, PreparedWrites):
            update = self.prepare(update)
        prepared, served_version, self.held = update.prepared, self.held, None
        assert isinstance(prepared, PreparedWrites), "prepare sets it"
        if prepared.writes is not None and prepared.base == served_version:
            for write in prepared.writes:
                write.write()
        else:
            self.fill(update.tensors, checked=prepared.writes is None)
        self.held = update.version

    def compare(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> WeightComparison:
        """Compare the served bits with those that loading `tensors` would give; names that are not
        served are ignored.
        """
        by_name = self._by_expected_name(tensors)
        expected_names = {other: name for name, others in self.tied.items() for other in others}
        served_names = {expected_names.get(name, name) for name in names} & set(self.shapes)
        differing = [name for name in sorted(served_names) if not self._is_served(name, by_name)]
        return WeightComparison(len(served_names), tuple(differing))

    def _is_served(self, name: str, by_name: Mapping[str, Tensor]) -> bool:
        if name in self.views:
            return all(
                _is_same(view, by_name[name], view.factor(by_name)) for view in self.views[name]
            )
        # A norm has no memory of its own: it is compared in the smallest matrix that it multiplies.
        after_norm = [
            (by_name[other].numel(), other, view)
            for other, views in self.views.items()
            for view in views
            if view.norm == name
        ]
        _, other, view = min(after_norm, key=lambda candidate: candidate[:2])
        rows = view.view[:NORM_ROWS]
        few = WeightView(rows, view.scale, view.norm)
        return _is_same(few, by_name[other].view(view.view.shape)[:NORM_ROWS], view.factor(by_name))

    def _by_expected_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pairs = ((name, self.held_as(name, tensors)) for name in self.shapes)
        return {name: tensors[stored_name] for name, stored_name in pairs if stored_name in tensors}

    def _check_names(self, tensors: Mapping[str, Tensor]) -> None:
        stored, owners = untie(tensors)
        stored_names = (self.held_as(name, tensors) for name in self.shapes)
        check_unexpected({owners.get(name, name) for name in stored_names}, stored)

    def held_as(self, name: str, tensors: Container[str]) -> str:
        names = (name, *self.tied.get(name, ()))
        return next((alias for alias in names if alias in tensors), name)

    def _changes_by_name(self, update: WeightUpdate) -> tuple[dict[str, TensorPatch], set[str]]:
        # A delta holds tied tensors once, under any of their names.
        owners = untie(update.tensors)[1]
        by_owner = {owners.get(p.name, p.name): p for p in update.patches or ()}
        restated = {owners.get(name, name) for name in update.whole}
        patches: dict[str, TensorPatch] = {}
        whole_names: set[str] = set()
        for name in self.shapes:
            stored_name = self.held_as(name, update.tensors)
            owner = owners.get(stored_name, stored_name)
            patch = by_owner.get(owner)
            if owner in restated or (patch is not None and _is_long(patch)):
                whole_names.add(name)
            elif patch is not None:
                patches[name] = patch
        return patches, whole_names


def _is_long(patch: TensorPatch) -> bool:
    return len(patch.values) * PATCH_SHARE > prod(patch.shape)


def _is_wide(norm_change: _NormChange, tensor: Tensor) -> bool:
    columns = norm_change.columns
    return columns is None or len(columns) * FILL_COLUMNS >= tensor.shape[-1]


def _columns(
    view: WeightView, norm_change: _NormChange, tensor: Tensor, factor: Tensor | None
) -> ElementsWrite:
    assert norm_change.columns is not None, "all columns are filled, not patched"
    width = tensor.shape[-1]
    starts = np.arange(tensor.numel() // width, dtype=np.int64)[:, None] * width
    indices = (starts + norm_change.columns).reshape(-1)
    values = tensor.reshape(-1, width)[:, torch.from_numpy(norm_change.columns)].reshape(-1)  # pyright: ignore[reportUnknownMemberType]
    return ElementsWrite(view, indices, values, factor)


def _is_same(view: WeightView, tensor: Tensor, factor: Tensor | None) -> bool:
    return all(
        torch.equal(bits_of_elements(served), bits_of_elements(view.served(rows, factor)))
        for served, rows in view.parts(tensor)
    )


def bits_of_elements(tensor: Tensor) -> Tensor:
    """Returns the bits as integers, so that −0 differs from +0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])
