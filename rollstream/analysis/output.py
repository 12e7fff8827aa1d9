"""Formats query results as a table of the terminal's width, as JSON lines or as CSV."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:  # `tail` formats records without duckdb
    from rollstream.analysis.session import QueryResult

CELL_CHARACTERS = 60  # longest cell, in characters
ITEMS_SHOWN = 4  # items shown of a list or map
_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
_NUMBERS = frozenset([*_WHOLE, *(f"U{kind}" for kind in _WHOLE), "FLOAT", "DOUBLE", "DECIMAL"])


def json_value(value: Any) -> Any:
    """Converts a value to JSON types: NaN to null, times to ISO text, bytes to hex."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value)
        return {str(key): json_value(one) for key, one in pairs.items()}
    if isinstance(value, list | tuple):
        return [json_value(one) for one in cast("Sequence[Any]", value)]
    return str(value)


def json_lines(answer: "QueryResult") -> Iterator[str]:
    """Yields one JSON object per row."""
    for rows in answer.batches:
        for row in rows:
            pairs = zip(answer.names, row, strict=True)
            yield json.dumps({name: json_value(value) for name, value in pairs})


def write_csv(answer: "QueryResult", file: TextIO) -> None:
    """Writes a header line, then one line per row; lists and maps as JSON, null as empty."""
    import csv  # takes a millisecond that other formats save

    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(answer.names)
    for rows in answer.batches:
        writer.writerows([_field(json_value(value)) for value in row] for row in rows)


def table_lines(answer: "QueryResult", rows_max: int, width: int) -> Iterator[str]:
    """Yields a table of the first rows, and notes about further rows and columns that do not fit.

    Formatted without rich, whose import takes half as long as DuckDB's.
    """
    rows = list(islice((row for batch in answer.batches for row in batch), rows_max + 1))
    texts = [list(answer.names), *([cell_text(value) for value in row] for row in rows[:rows_max])]
    widths = [max(_width(row[index]) for row in texts) for index in range(len(answer.names))]
    fitting = _fitting(widths, width)
    numeric = [kind.split("(")[0] in _NUMBERS for kind in answer.kinds]
    for number, row in enumerate(texts):
        cells = zip(row[:fitting], widths, numeric, strict=False)
        yield " │ ".join(_padded(*one) for one in cells).rstrip()
        if number == 0:
            yield "─┼─".join("─" * one for one in widths[:fitting])
    if len(rows) > rows_max:
        yield f"the first {rows_max} rows; --rows N, --csv or --json print more"
    if fitting < len(answer.names):
        yield f"columns that do not fit: {', '.join(answer.names[fitting:])}"


def cell_text(value: Any) -> str:
    """Returns a value as short text; of a long list or map the first items and the count."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | Decimal):
        return _number(float(value))
    if isinstance(value, datetime):
        return value.isoformat(" ", "milliseconds")
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value)
        return (
            "{"
            + _some(
                [f"{k}: {cell_text(v)}" for k, v in islice(pairs.items(), ITEMS_SHOWN)], len(pairs)
            )
            + "}"
        )
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return "[" + _some([cell_text(one) for one in items[:ITEMS_SHOWN]], len(items)) + "]"
    text = str(json_value(value)).replace("\n", "\\n")
    return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 1] + "…"


def _some(shown: Sequence[str], count: int) -> str:
    return ", ".join(shown) + (f", … {count} in all" if count > len(shown) else "")


def _number(value: float) -> str:
    if not math.isfinite(value) or abs(value) < 1e5:
        return f"{value:.6g}"
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _field(value: Any) -> Any:
    """Returns a value as written to CSV."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict | list) else value


def _fitting(widths: Sequence[int], width: int) -> int:
    """Returns how many columns fit, counted from the left; at least one."""
    used = 0
    for index, one in enumerate(widths):
        used += one + (3 if index else 0)
        if used > width and index:
            return index
    return len(widths)


def _padded(text: str, width: int, to_right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if to_right else text + space


def _width(text: str) -> int:
    """Returns the terminal columns of the text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
