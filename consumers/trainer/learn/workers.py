"""Worker threads whose results are handed in in the order in which the jobs were submitted.

So the combined result does not depend on the number of threads or on which one finishes first.
Bounds (invariant 8): at most as many jobs are queued as there are threads, and a thread that
finishes early waits with its single result.
"""

# pyright: reportUnknownMemberType=false

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")


class OrderedWorkers(Generic[Job, Result]):
    """Calls `hand_in` with one result at a time, in the order of submission, from the thread that
    computed it.

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
