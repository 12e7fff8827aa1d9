"""The error of a learner that cannot compute micro-batches, and the test for errors of short
memory.
"""

import torch

from rollstream.errors import RollstreamError

_CPU_ALLOCATOR = "can't allocate memory"  # DefaultCPUAllocator raises a plain RuntimeError


class ComputeFailed(RollstreamError, RuntimeError):
    """The learner raised on `micro_batches`, counted from 0 within the step in the order of
    submission; several where they are computed together. The cause is the original exception.
    """

    def __init__(self, micro_batches: tuple[int, ...], cause: BaseException) -> None:
        numbers = ", ".join(map(str, micro_batches))
        super().__init__(
            f"micro-batch {numbers} of the step cannot be computed: {type(cause).__name__}: {cause}"
        )
        self.micro_batches = micro_batches


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a smaller micro-batch may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
