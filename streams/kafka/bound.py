"""A bound of bytes in flight that threads share; kafka-python's producer has none."""

import threading

from rollstream.deadline import Deadline


class ByteSemaphore:
    """At most `limit` bytes are taken at any time. A request above `limit` is a programmer
    error.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._changed = threading.Condition()

    def take(self, amount: int, wait_s: float) -> bool:
        """Take `amount` bytes; returns False if they were not available within `wait_s`."""
        assert amount <= self.limit, f"{amount} bytes can never be taken of {self.limit}"
        deadline = Deadline(wait_s)
        with self._changed:
            while self.taken + amount > self.limit:
                if deadline.passed():
                    return False
                self._changed.wait(deadline.remaining_s())
            self.taken += amount
            return True

    def give_back(self, amount: int) -> None:
        with self._changed:
            self.taken -= amount
            self._changed.notify_all()
