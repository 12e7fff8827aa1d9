"""Tensors as bytes and back: names of dtypes, and the hash that identifies a tensor.

The hash of a tensor is xxh3-128 over `DTYPE[d0,d1,…]` in ASCII (safetensors' dtype names, no
spaces) followed by its little-endian row-major bytes, so any language can verify it.
"""

from collections.abc import Mapping

import numpy as np
import torch
import xxhash

from rollstream.storage.stores.base import Data

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's row-major bytes; no copy for a contiguous one in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_hash(dtype: str, shape: tuple[int, ...], data: Data) -> str:
    """Hash of a tensor by its safetensors dtype name, shape and bytes."""
    hasher = xxhash.xxh3_128(f"{dtype}[{','.join(map(str, shape))}]".encode())
    hasher.update(data)
    return hasher.hexdigest()


def state_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """xxh3-128 over names and bytes, in the order of the names."""
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hasher.update(name.encode())
        hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()


def tensor_of(data: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these bytes, sharing their memory."""
    if not data.nbytes:
        return torch.empty(shape, dtype=DTYPES[dtype])
    flat = torch.from_numpy(np.frombuffer(data, dtype=np.uint8))  # pyright: ignore[reportUnknownMemberType]
    return flat.view(DTYPES[dtype]).reshape(shape)


def untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each memory once, under its first name, and a map from the other names to that one."""
    kept: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = first.setdefault(place, name) if tensor.numel() else name
        if owner == name:
            kept[name] = tensor
        else:
            tied[name] = owner
    return kept, tied
