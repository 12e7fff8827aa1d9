"""Tensors of chosen rows of a starting model, for ranks that share it: each reads only the blocks
with its rows.
"""

from pathlib import Path

import numpy as np
import torch

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import CorruptObject
from rollstream.storage.starting_model.manifest import ModelSource, describe_model
from rollstream.storage.starting_model.reading import StoredModel
from rollstream.storage.stores.read_only import FolderReader
from rollstream.storage.weights.tensors import DTYPES, tensor_of


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


class ModelRows:
    """Reads rows of a starting model's tensors; raises as `fetch_rows`."""

    def __init__(self, model: StoredModel) -> None:
        self.model = model

    def __contains__(self, name: str) -> bool:
        return name in self.model.manifest.tensors

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns rows `[start, stop)` of a tensor in fp32."""
        return fetch_rows(self.model, name, start, stop, torch.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.model.manifest.tensors[name].shape

    def whole(self, name: str) -> torch.Tensor:
        """Returns the tensor as stored."""
        return fetch_rows(self.model, name, 0, self.model.manifest.tensors[name].rows)

    def identity(self) -> str:
        """Returns a hash that differs between different models: machines that train together
        compare it.
        """
        return self.model.manifest.digest


def folder_rows(folder: Path) -> ModelRows:
    """Returns the rows of the model in a checkpoint folder, all of which is hashed first: for runs
    of earlier releases, whose store has no model. Raises `ConfigurationError` if a file is damaged.
    """
    manifest = describe_model(ModelSource(folder), "", 0.0)
    # A file that changes after it was hashed is not read; the error names the object in its place.
    return ModelRows(StoredModel(FolderReader(ContainedFolder(folder)), manifest, (folder,)))
