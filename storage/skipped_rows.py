"""A run's skipped rows, as one object of its store: the audit names them, on any host and long
after.
"""

import re

import msgspec

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.foreign_json import parse_json
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.run_keys import RunKeys

SKIPPED_KEY = "skipped-rows.json"
RUN_KEYS = (RunKeys(re.compile(re.escape(SKIPPED_KEY)), "cut", "any"),)
NAMED_MAX = 100  # rows by their places; the counts cover all


class SkippedRecord(msgspec.Struct, frozen=True):
    """`named` are the first skipped rows, each with its file, its line and the reason."""

    data_set: str
    rows: int
    skipped: int
    named: tuple[str, ...]

    def __str__(self) -> str:
        more = self.skipped - len(self.named)
        names = "; ".join(self.named) + (f"; and {more} more" if more > 0 else "")
        return (
            f"{self.skipped} of {self.rows} rows of data set {self.data_set} are skipped: {names}"
        )


def write_skipped_rows(store: ObjectStore, records: tuple[SkippedRecord, ...]) -> None:
    store.put(SKIPPED_KEY, msgspec.json.encode(records))


def read_skipped_rows(store: ObjectStore) -> tuple[SkippedRecord, ...]:
    """Returns the records; () for a run without any. Raises `CorruptObject` if they are damaged."""
    try:
        data = store.get(SKIPPED_KEY)
    except ObjectMissing:
        return ()
    try:
        return parse_json(data, tuple[SkippedRecord, ...])
    except ValueError as error:
        raise CorruptObject(f"object {SKIPPED_KEY} is damaged: {error}") from None
