"""The trainer's publisher as a task under the baton: the same steps, without a thread of its
own.
"""

from collections import deque
from dataclasses import dataclass, field

from rollstream.consumers.trainer.learn.workers import BufferPool
from rollstream.consumers.trainer.publisher import QUEUE_MAX, StepPublisher, StepSnapshot
from testbed.stepped.baton import Baton

WAIT_S = 0.01


@dataclass
class SteppedPublisher:
    """The interface that `Trainer` uses; `inner` publishes in the task that calls `run` and deletes
    in the task that calls `delete`.
    """

    inner: StepPublisher
    baton: Baton
    _queue: deque[StepSnapshot] = field(default_factory=deque[StepSnapshot])
    _due: list[bool] = field(default_factory=list[bool])
    """Published steps after which nothing was deleted yet: whether each had a checkpoint."""
    _busy: bool = False
    _deleting: bool = False
    _closed: bool = False
    _failed: BaseException | None = None

    def run(self) -> None:
        """Publishes the queued versions until `close`."""
        try:
            while self._queue or not self._closed:
                if not self._queue:
                    self.baton.wait(WAIT_S)
                    continue
                self._busy = True
                snapshot = self._queue.popleft()
                self.inner.publish(snapshot)
                self._due.append(snapshot.checkpoint is not None)
                self._busy = False
        except BaseException as error:
            self._failed = error
            raise

    def delete(self) -> None:
        """Deletes beside `run` until `close`."""
        try:
            while self._is_active():
                if not self._due:
                    self.baton.wait(WAIT_S)
                    continue
                self._deleting, due = True, self._due
                self._due = []
                self.inner.delete_unneeded(any(due))
                self._deleting = False
        except BaseException as error:
            self._failed = error
            raise

    def _is_active(self) -> bool:
        return bool(self._queue or self._busy or self._due or self._deleting or not self._closed)

    @property
    def weight_buffers(self) -> BufferPool:
        return self.inner.weight_buffers

    @property
    def state_buffers(self) -> BufferPool:
        return self.inner.state_buffers

    def await_room(self) -> None:
        while len(self._queue) >= QUEUE_MAX:
            self.check()
            self.baton.wait(WAIT_S)
        self.check()

    def await_lent(self) -> None:
        """Returns at once: the learners of stepped runs lend no state."""

    def submit(self, snapshot: StepSnapshot) -> None:
        self._queue.append(snapshot)

    def check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        self._closed = True
        while self._is_active():
            self.check()
            self.baton.wait(WAIT_S)
        self.check()
