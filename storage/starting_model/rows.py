"""Tensors of chosen rows of a starting model, for ranks that share it: each reads only the blocks
with its rows. `FolderRows` reads a checkpoint folder, for runs of earlier releases, whose store has
no model.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import safetensors
import torch
import xxhash
from safetensors import SafetensorError

from rollstream.errors import ConfigurationError, CorruptObject
from rollstream.storage.model_folder.hf_folder import CONFIG
from rollstream.storage.model_folder.hf_weights import read_header
from rollstream.storage.starting_model.reading import StoredModel
from rollstream.storage.weights.tensors import DTYPES, tensor_bytes, tensor_of

_V = TypeVar("_V")


def fetch_rows(
    model: StoredModel, name: str, start: int, stop: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns rows `[start, stop)` of a tensor's first dimension, as `dtype` or as stored, in
    memory of the caller; one piece of the stored rows is in memory besides. Raises `CorruptObject`,
    which names the object, if a block differs from its hash.
    """
    tensor = model.manifest.tensors[name]
    if tensor.dtype not in DTYPES:
        raise CorruptObject(
            f"tensor {name} of the run's model has the unknown dtype {tensor.dtype!r}"
        )
    shape = (stop - start, *tensor.shape[1:])
    rows = torch.empty(shape, dtype=dtype or DTYPES[tensor.dtype])
    for first, data in model.row_pieces(name, start, stop):
        count = len(data) // tensor.row_bytes
        # Copied, because the bytes of a store cannot be written and torch warns of such memory.
        piece = np.array(np.frombuffer(data, np.uint8)).data
        stored = tensor_of(piece, tensor.dtype, (count, *tensor.shape[1:]))
        rows[first - start : first - start + count] = stored
    return rows if tensor.shape else rows.reshape(())


class ModelRows(Protocol):
    """Reads chosen rows of a starting model's tensors, and only these."""

    def __contains__(self, name: str) -> bool: ...

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns rows `[start, stop)` of a tensor in fp32."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """Returns the tensor as stored."""
        ...

    def identity(self) -> str:
        """Returns a hash that differs between different models: machines that train together
        compare it.
        """
        ...


class StoredRows:
    """Reads rows of the model in a run's store; raises as `fetch_rows`."""

    def __init__(self, model: StoredModel) -> None:
        self.model = model

    def __contains__(self, name: str) -> bool:
        return name in self.model.manifest.tensors

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return fetch_rows(self.model, name, start, stop, torch.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.model.manifest.tensors[name].shape

    def whole(self, name: str) -> torch.Tensor:
        return fetch_rows(self.model, name, 0, self.model.manifest.tensors[name].rows)

    def identity(self) -> str:
        return self.model.manifest.digest


class FolderRows:
    """Reads rows from a checkpoint folder; `files` maps tensors to their files. Raises
    `ConfigurationError` if a file is damaged or shorter.
    """

    def __init__(self, folder: Path, files: Mapping[str, Path]) -> None:
        self._folder, self._files = folder, files
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._read(name, lambda file: file.get_slice(name)[start:stop]).to(torch.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._read(name, lambda file: tuple(file.get_slice(name).get_shape()))

    def whole(self, name: str) -> torch.Tensor:
        return self._read(name, lambda file: file.get_tensor(name))

    def _read(self, name: str, read: Callable[[Any], _V]) -> _V:
        path = self._files[name]
        try:
            if path not in self._open:
                self._open[path] = safetensors.safe_open(path, "pt")  # pyright: ignore[reportUnknownMemberType]
            return read(self._open[path])
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"model.path: {path} cannot be read: {error}") from error

    def identity(self) -> str:
        """Returns a hash of the configuration, all headers and each tensor's first row."""
        # Not all bytes: that would read a large model completely.
        hasher = xxhash.xxh3_128((self._folder / CONFIG).read_bytes())
        for path in sorted(set(self._files.values())):
            with path.open("rb") as file:
                hasher.update(read_header(file))
        for name in sorted(self._files):
            hasher.update(tensor_bytes(self.rows(name, 0, 1)))
        return hasher.hexdigest()
