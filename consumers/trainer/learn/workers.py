"""Provides a learner's threads and memory: worker threads with ordered results, a pool of host
memory for snapshots, and the process's allocator.
"""

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
    """Runs `work` on jobs in worker threads. `hand_in` is called with one result at a time, in the
    order of submission, from the thread that computed it.

    So the combined result does not depend on the number of threads or on which one finishes first.
    Bounds (invariant 8): at most as many jobs are queued as there are threads, and a thread that
    finishes early waits with its single result.

    An exception in either function ends all work and is raised by the caller's next `submit` or
    `wait`. `busy_s` is the CPU time that the threads spent in `work`.
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
        """Queue a job; waits while as many jobs are queued as there are threads."""
        while True:
            self._raise()
            try:
                self._jobs.put((self._submitted, job), timeout=0.5)
                break
            except queue.Full:
                continue
        self._submitted += 1

    def wait(self) -> None:
        """Wait until the results of all submitted jobs were handed in."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._done == self._submitted)
        self._raise()

    def close(self) -> None:
        """End the threads after their present jobs. Idempotent."""
        while any(thread.is_alive() for thread in self._threads):
            try:
                self._jobs.put(None, timeout=0.05)
            except queue.Full:
                continue

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)  # OpenMP's count is per thread
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
    """Lends host memory for copies of tensors of one layout: at most `copies_max` copies are in use
    at a time, and the memory of up to `idle_max` released ones is kept for reuse. A copy is
    exclusive to its holder until it is released.

    Fresh memory for every step would cost several times the copy itself (each page is faulted in
    and cleared: 78 ms against 15 ms for 62 M parameters to bf16, one core), and no step is trained
    meanwhile.
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
        """Returns a complete copy in host memory, floating-point tensors as `dtype` (None:
        unchanged); tied tensors share memory.
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
            for index, mine in enumerate(self._used):
                if mine is copy:
                    del self._used[index]
                    if len(self._idle) < self._idle_max:
                        self._idle.append(mine)
                    return

    def _memory(self, kept: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        wanted = {name: _dtype(tensor, dtype) for name, tensor in kept.items()}
        with self._lock:
            assert len(self._used) < self._copies_max, "a copy was not released"
            copy = self._idle.pop() if self._idle else {}
            if any(
                name not in copy or not _fits(copy[name], kept[name], wanted[name]) for name in kept
            ):
                copy = {name: _empty(tensor, wanted[name]) for name, tensor in kept.items()}
            self._used.append(copy)
        return copy


LENT_BYTES_MIN = 1_000_000_000  # a smaller state is copied, so that no update waits for it


def lends_state(state_bytes: int, device: torch.device) -> bool:
    """Whether a checkpoint is written from the state itself: on the CPU a copy of a large state
    would nearly double the memory of a rank. The next update then waits until it is written.
    """
    return device.type == "cpu" and state_bytes > LENT_BYTES_MIN


def _dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _fits(memory: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    return memory.shape == tensor.shape and memory.dtype == dtype


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns uninitialised host memory, pinned for CUDA tensors: the copy then runs at the link's
    full speed.
    """
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory in the process instead of returning it to the kernel; False
    where the C library has no such setting. Idempotent.

    A training pass allocates and frees the same tens of megabytes again and again. By default glibc
    unmaps large blocks at once, so each pass faults every page in again: measured at 5 to 20 % of a
    step's CPU time. Peak memory does not change.

    All threads share one arena: every further arena would keep its own peak, and allocations are
    too few to contend.
    """
    return _set_allocator({M_MMAP_THRESHOLD: 1 << 30, M_TRIM_THRESHOLD: NEVER, M_ARENA_MAX: 1})


def return_freed_memory() -> bool:
    """Make glibc return every block of a megabyte or more to the kernel when it is freed; False
    where the C library has no such setting. Idempotent.

    By default a freed block raises that bound to its own size, up to 32 MB, and every block freed
    below it stays in the process: a rank of 53 M parameters had 0.36 GB more than its state and its
    gathered layers. The page faults cost less than a rank that does not fit.
    """
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
    """Whether the error reports a lack of memory, so that a smaller micro-batch may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
