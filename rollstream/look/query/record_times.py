"""Bounds the timestamps of records to those of a calendar; others count as unknown. DuckDB and
Python's `datetime` raise at them, and one record would end the view of all others.
"""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `tail` formats times without it
    import pyarrow as pa

FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999
"""Begin of year 1 and end of year 9999."""


def utc_time(timestamp_ms: int) -> datetime | None:
    """Returns None outside of the years 1 to 9999."""
    if not FIRST_MS <= timestamp_ms <= LAST_MS:
        return None
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC)


def with_known_times(table: "pa.Table") -> "pa.Table":
    """Returns the table with null in `timestamp` for each impossible time."""
    import pyarrow as pa
    import pyarrow.compute as pc

    compute: Any = pc
    at = table.schema.get_field_index("timestamp")
    times: Any = table.column(at)
    numbers = times.cast(pa.int64())
    ends = compute.min_max(numbers).as_py()
    if ends["min"] is None or (ends["min"] >= FIRST_MS and ends["max"] <= LAST_MS):
        return table
    inside = compute.and_(
        compute.greater_equal(numbers, FIRST_MS), compute.less_equal(numbers, LAST_MS)
    )
    known_times = compute.if_else(inside, times, pa.scalar(None, times.type))
    field: Any = table.schema.field(at)
    return table.set_column(at, field.with_nullable(True), known_times)
