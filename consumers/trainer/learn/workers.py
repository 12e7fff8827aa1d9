"""Threads and memory of a learner."""

import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rollstream.storage.weights.tensors import untie

Job = TypeVar("Job")
Result = TypeVar("Result")


class OrderedWorkers(Generic[Job, Result]):
    """Runs `work` on each job in one of `count` threads, and passes the results to `hand_in` one at
    a time in the order of submission.

    Bounds (invariant 8): at most `count` jobs are queued, and a thread that finishes early waits
    with its one result. After an exception no further result is handed in, and later calls raise
    it. `busy_s` is the CPU time in `work`.
    """

    def __init__(
        self,
        count: int,
        torch_threads: int,
        work: Callable[[Job], Result],
        hand_in: Callable[[Result], None],
    ) -> None:
        self._work, self._hand_in, self._torch_threads = work, hand_in, torch_threads
        self._jobs: queue.Queue[tuple[int, Job] | None] = queue.Queue(count)
        self._changed = threading.Condition()
        self._submitted = self._done = 0
        self._failure: BaseException | None = None
        self.busy_s = 0.0
        self._threads = [
            threading.Thread(target=self._run, name=f"learner-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Waits while the queue is full. To be called from one thread."""
        while True:
            self._raise()
            try:
                self._jobs.put((self._submitted, job), timeout=0.5)
                break
            except queue.Full:
                continue
        self._submitted += 1

    def wait(self) -> None:
        """Waits until the results of all submitted jobs were handed in."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._done == self._submitted)
        self._raise()

    def close(self) -> None:
        """Ends the threads after the jobs submitted so far. Idempotent."""
        while any(thread.is_alive() for thread in self._threads):
            try:
                self._jobs.put(None, timeout=0.05)
            except queue.Full:
                continue

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)  # OpenMP keeps this number for each thread
        while (item := self._jobs.get()) is not None:
            index, job = item
            if self._failure is not None:
                continue  # drain the queue, so that no submit blocks on it
            try:
                self._do(index, job)
            except BaseException as error:  # noqa: BLE001  the caller's thread raises it
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()

    def _do(self, index: int, job: Job) -> None:
        began = time.thread_time()
        result = self._work(job)
        busy_s = time.thread_time() - began
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._done == index)
            if self._failure is None:
                self._hand_in(result)
                self.busy_s += busy_s
                self._done += 1
                self._changed.notify_all()


class BufferPool:
    """Copies tensors to host memory, and reuses that of released copies of the same names, shapes
    and types. At most `copies_max` are in use, and at most `idle_max` released ones are kept.
    Thread-safe.
    """

    def __init__(self, copies_max: int, idle_max: int | None = None) -> None:
        self._copies_max = copies_max
        self._idle_max = copies_max if idle_max is None else idle_max
        self._used: list[dict[str, Tensor]] = []
        # The kernel clears each page of fresh memory: 78 ms instead of 15 ms for a copy of 62 M
        # parameters to bf16 on one core, in which no step is trained.
        self._idle: list[dict[str, Tensor]] = []
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        return len(self._used)

    def copy(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Copies floating-point tensors as `dtype` (None: unchanged); tied ones share memory. The
        copy has no other user until `release`.
        """
        untied, tied = untie(tensors)
        copy = self._memory(untied, dtype)
        for name, tensor in untied.items():
            copy[name].copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in untied.values()):
            torch.cuda.current_stream().synchronize()
        copy.update({name: copy[owner] for name, owner in tied.items()})
        return copy

    def release(self, copy: object) -> None:
        """Ignores a copy from elsewhere."""
        with self._lock:
            for index, mine in enumerate(self._used):
                if mine is copy:
                    del self._used[index]
                    if len(self._idle) < self._idle_max:
                        self._idle.append(mine)
                    return

    def _memory(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
    ) -> dict[str, Tensor]:
        dtypes = {name: _dtype(tensor, dtype) for name, tensor in tensors.items()}
        with self._lock:
            assert len(self._used) < self._copies_max, "a copy was not released"
            copy = self._idle.pop() if self._idle else {}
            if any(
                name not in copy or not _fits(copy[name], tensors[name], dtypes[name])
                for name in tensors
            ):
                copy = {name: _empty(tensor, dtypes[name]) for name, tensor in tensors.items()}
            self._used.append(copy)
        return copy


LENT_BYTES_MIN = 1_000_000_000
"""Smaller states are copied for a checkpoint, so that the next update need not wait."""


def lends_state(state_bytes: int, device: torch.device) -> bool:
    """A checkpoint is written from the learner's state itself: a copy of a large state on the CPU
    would nearly double the process's memory.
    """
    return device.type == "cpu" and state_bytes > LENT_BYTES_MIN


def _dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _fits(memory: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    return memory.shape == tensor.shape and memory.dtype == dtype


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Pinned for a CUDA tensor, so that the copy runs at the full speed of the link.
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory. Returns False where the C library has no such setting.
    Idempotent.
    """
    # A training pass allocates and frees the same tens of megabytes again and again; glibc returns
    # large blocks at once, and the kernel's new pages cost 5 to 20 % of a step's CPU time. Peak
    # memory stays. One arena: each further one would keep the memory of its own peak, and
    # allocations are too rare for threads to wait.
    return _set_allocator({M_MMAP_THRESHOLD: 1 << 30, M_TRIM_THRESHOLD: NEVER, M_ARENA_MAX: 1})


def return_freed_memory() -> bool:
    """Makes glibc return every freed block of a megabyte or more to the kernel; returns as
    `keep_freed_memory`. For a rank with a large state.
    """
    # By default glibc raises this bound to the size of each larger freed block, up to 32 MB: a rank
    # of a model with 53 M parameters had 0.36 GB more than its state and the gathered layers.
    return _set_allocator({M_MMAP_THRESHOLD: 1 << 20})


def _set_allocator(options: Mapping[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, value) == 1 for option, value in options.items())


_CPU_ALLOCATOR = "can't allocate memory"  # DefaultCPUAllocator raises a plain RuntimeError


def is_out_of_memory(error: BaseException | None) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
