"""A pool of host memory for snapshots of tensors.

Fresh memory for every step would cost several times the copy itself (each page is faulted in and
cleared: 78 ms against 15 ms for 62 M parameters to bf16, one core), and no step is trained
meanwhile. A copy is exclusive to its holder until it is given back.
"""

# pyright: reportUnknownMemberType=false

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from rollstream.storage.weights.tensors import untie


class BufferPool:
    """At most `copies_max` copies of tensors of one layout are in use at a time; the memory of up
    to `idle_max` released ones is kept for reuse.
    """

    def __init__(self, copies_max: int, idle_max: int | None = None) -> None:
        self._copies_max = copies_max
        self._idle_max = copies_max if idle_max is None else idle_max
        self._used: list[dict[str, Tensor]] = []
        self._idle: list[dict[str, Tensor]] = []
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        """Number of copies that are in use."""
        return len(self._used)

    def copy(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """A complete copy in host memory, floating-point tensors as `dtype` (None: unchanged); tied
        ones share memory.
        """
        kept, tied = untie(tensors)
        copy = self._memory(kept, dtype)
        for name, tensor in kept.items():
            copy[name].copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in kept.values()):
            torch.cuda.current_stream().synchronize()
        copy.update({name: copy[owner] for name, owner in tied.items()})
        return copy

    def release(self, copy: object) -> None:
        """Release a copy that is no longer read; a copy that is not of this pool is ignored."""
        with self._lock:
            for place, mine in enumerate(self._used):
                if mine is copy:
                    del self._used[place]
                    if len(self._idle) < self._idle_max:
                        self._idle.append(mine)
                    return

    def _memory(self, kept: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        wanted = {name: _dtype(tensor, dtype) for name, tensor in kept.items()}
        with self._lock:
            assert len(self._used) < self._copies_max, "a copy was not given back"
            copy = self._idle.pop() if self._idle else {}
            if any(
                name not in copy or not _fits(copy[name], kept[name], wanted[name]) for name in kept
            ):
                copy = {name: _empty(tensor, wanted[name]) for name, tensor in kept.items()}
            self._used.append(copy)
        return copy


def _dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _fits(memory: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    return memory.shape == tensor.shape and memory.dtype == dtype


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised host memory, pinned for CUDA tensors: the copy then runs at the link's full
    speed.
    """
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
