"""Query results as a table of the terminal's width, as lines for a pipe, as JSON lines or as CSV;
all but the table complete, in little memory.
"""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:  # `tail` formats records without duckdb
    from rollstream.look.query.session import QueryResult

CELL_CHARACTERS = 60  # longest text value in a table; a longer one is cut and ends in "…"
ITEMS_SHOWN = 4  # items of a list or map that a table shows
_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
_NON_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}
_INFINITE_TIMES = {datetime.max: "infinity", datetime.min: "-infinity"}  # as DuckDB hands them over
_NUMBERS = frozenset([*_WHOLE, *(f"U{kind}" for kind in _WHOLE), "FLOAT", "DOUBLE", "DECIMAL"])


def json_value(value: Any, is_exact: bool = False) -> Any:
    """Returns times as ISO text or "infinity", durations as seconds, bytes as hex digits, decimals
    that no float equals and other types as text. NaN and infinities become null, or with `is_exact`
    the texts "NaN", "Infinity" and "-Infinity".
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return _NON_FINITE.get(value, "NaN") if is_exact else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Decimal):
        nearest = float(value)
        return nearest if Decimal(repr(nearest)) == value else str(value)
    if isinstance(value, datetime):
        return _INFINITE_TIMES.get(value) or value.isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value)
        return {str(key): json_value(inner, is_exact) for key, inner in pairs.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner, is_exact) for inner in cast("Sequence[Any]", value)]
    return str(value)


def json_lines(answer: "QueryResult") -> Iterator[str]:
    for rows in answer.batches:
        for row in rows:
            pairs = zip(answer.names, row, strict=True)
            yield json.dumps({name: json_value(value, is_exact=True) for name, value in pairs})


def write_csv(answer: "QueryResult", file: TextIO) -> None:
    """A header line, then one per row. Lists and maps are written as JSON, null as an empty field,
    NaN and infinities as `nan` and `inf`.
    """
    import csv  # the import takes a millisecond, which the other formats save

    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(answer.names)
    for rows in answer.batches:
        writer.writerows([_field(value) for value in row] for row in rows)


def tab_lines(answer: "QueryResult", rows_max: int | None = None) -> Iterator[str]:
    """The columns' names and every row, or the first `rows_max`, values as in `write_csv` but
    whole.
    """
    yield tab_separated(answer.names)
    for row in islice((row for batch in answer.batches for row in batch), rows_max):
        fields = [_field(value) for value in row]
        yield tab_separated(["" if field is None else str(field) for field in fields])


def tab_separated(cells: Sequence[str]) -> str:
    """One line of a pipe; tabs and line breaks become escapes."""
    return "\t".join(cell.replace("\t", "\\t").replace("\n", "\\n") for cell in cells)


def table_lines(answer: "QueryResult", rows_max: int, width: int) -> Iterator[str]:
    """The first `rows_max` rows, with as many columns as fit into `width` characters, then a line
    if there are more rows and one that names the other columns.
    """
    rows = list(islice((row for batch in answer.batches for row in batch), rows_max + 1))
    texts = [list(answer.names), *([cell_text(value) for value in row] for row in rows[:rows_max])]
    widths = [max(_width(row[index]) for row in texts) for index in range(len(answer.names))]
    # Not by rich's tables, whose import takes half as long as that of DuckDB.
    fitting = _fitting(widths, width)
    numeric = [kind.split("(")[0] in _NUMBERS for kind in answer.kinds]
    for number, row in enumerate(texts):
        cells = zip(row[:fitting], widths, numeric, strict=False)
        yield " │ ".join(_padded(*cell) for cell in cells).rstrip()
        if number == 0:
            yield "─┼─".join("─" * column_width for column_width in widths[:fitting])
    if len(rows) > rows_max:
        yield f"the first {rows_max} rows; --rows N, --csv or --json print more"
    if fitting < len(answer.names):
        yield f"columns that do not fit: {', '.join(answer.names[fitting:])}"


def cell_text(value: Any) -> str:
    """Returns a short text for a table: null as "-", a long list or map by its first items and
    their number in all, long text cut off.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime):
        return _INFINITE_TIMES.get(value) or value.isoformat(" ", "milliseconds")
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
        return "[" + _some([cell_text(inner) for inner in items[:ITEMS_SHOWN]], len(items)) + "]"
    text = str(json_value(value)).replace("\n", "\\n")
    return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 1] + "…"


def _some(shown: Sequence[str], count: int) -> str:
    return ", ".join(shown) + (f", … {count} in all" if count > len(shown) else "")


def _number(value: float) -> str:
    # From 100 000 on, six digits would cut off whole ones.
    if not math.isfinite(value) or abs(value) < 1e5:
        return f"{value:.6g}"
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _field(value: Any) -> Any:
    # NaN and infinities become `nan` and `inf`.
    if isinstance(value, Decimal) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    value = json_value(value, is_exact=True)
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict | list) else value


def _fitting(widths: Sequence[int], width: int) -> int:
    """Returns how many columns, from the left, fit into `width`; at least one."""
    used = 0
    for index, column_width in enumerate(widths):
        used += column_width + (3 if index else 0)
        if used > width and index:
            return index
    return len(widths)


def _padded(text: str, width: int, to_right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if to_right else text + space


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    # Some characters take two places on a terminal.
    from rich.cells import cell_len

    return cell_len(text)
