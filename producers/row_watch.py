"""Counts beside the role `prompts` the tokens of rows that may be too long, the longest first."""

import logging
import threading
from collections.abc import Callable, Sequence

from rollstream.errors import ConfigurationError
from rollstream.metric_values import MetricValues
from rollstream.producers.tasks.base import ReadsRows, Task
from rollstream.storage.skipped_rows import SkippedRecord

log = logging.getLogger(__name__)

LOOK_S = 0.5
LOGGED_MAX = 20  # rows that the role's log names


class RowWatch:
    """`note` gets the records of skipped rows. If too many are, `stop` is set and `close` raises
    the `ConfigurationError` that lists them.
    """

    def __init__(
        self,
        task: Task,
        note: Callable[[tuple[SkippedRecord, ...]], None],
        stop: threading.Event,
    ) -> None:
        self._task, self._note, self._stop = task, note, stop
        self._ended = threading.Event()
        self._named = 0
        self._refusal: ConfigurationError | None = None
        self._threads = [
            threading.Thread(target=self._count, name="row-count", daemon=True),
            threading.Thread(target=self._look, name="row-watch", daemon=True),
        ]

    def start(self) -> None:
        if not isinstance(self._task, ReadsRows):
            return
        self._task.read_rows()
        self._report()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads. Raises the refusal if there is one."""
        self._ended.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        if isinstance(self._task, ReadsRows):
            self._report()
        if self._refusal is not None:
            raise self._refusal

    def metric_values(self) -> MetricValues:
        records = self._records()
        return {
            "prompts_rows": sum(record.rows for record in records),
            "prompts_rows_skipped": sum(record.skipped for record in records),
        }

    def _count(self) -> None:
        assert isinstance(self._task, ReadsRows)
        try:
            self._task.count_long_rows(self._ended)
        except ConfigurationError as error:
            self._refusal = error
            self._stop.set()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._report()

    def _report(self) -> None:
        records = [record for record in self._records() if record.skipped]
        count = sum(record.skipped for record in records)
        if count == self._named:
            return
        names = [name for record in records for name in record.named]
        for name in names[self._named : LOGGED_MAX]:
            log.warning("a row is skipped: %s", name)
        self._named = count
        self._note(tuple(records))

    def _records(self) -> Sequence[SkippedRecord]:
        return self._task.skipped_rows() if isinstance(self._task, ReadsRows) else ()
