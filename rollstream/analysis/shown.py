"""Answers for people (a table as wide as the terminal) and for programs (JSON lines, CSV)."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import islice
from typing import Any, TextIO, cast

from rollstream.analysis.session import Answer

CELL = 60  # characters of a cell
ITEMS = 4  # of a list that are shown
_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
_NUMBERS = frozenset([*_WHOLE, *(f"U{kind}" for kind in _WHOLE), "FLOAT", "DOUBLE", "DECIMAL"])


def plain(value: Any) -> Any:
    """What JSON holds of a value: no NaN, times as ISO text, bytes in hex."""
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
        return {str(key): plain(one) for key, one in pairs.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in cast("Sequence[Any]", value)]
    return str(value)


def json_lines(answer: Answer) -> Iterator[str]:
    """One object a row."""
    for rows in answer.batches:
        for row in rows:
            pairs = zip(answer.names, row, strict=True)
            yield json.dumps({name: plain(value) for name, value in pairs})


def write_csv(answer: Answer, file: TextIO) -> None:
    """A line of names, then one a row; lists and maps as JSON, null as nothing."""
    import csv  # a millisecond that other answers need not wait

    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(answer.names)
    for rows in answer.batches:
        writer.writerows([_field(plain(value)) for value in row] for row in rows)


def table_lines(answer: Answer, rows_max: int, width: int) -> Iterator[str]:
    """The first rows under their names, and whether there are more; columns that do not fit are
    named below.

    Drawn here because importing rich takes half as long again as DuckDB itself.
    """
    rows = list(islice((row for batch in answer.batches for row in batch), rows_max + 1))
    texts = [list(answer.names), *([cell(value) for value in row] for row in rows[:rows_max])]
    widths = [max(_width(row[place]) for row in texts) for place in range(len(answer.names))]
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
        yield f"not shown for want of width: {', '.join(answer.names[fitting:])}"


def cell(value: Any) -> str:
    """A value in a few characters; of a long list or map its first items and how many they are."""
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
            + _some([f"{k}: {cell(v)}" for k, v in islice(pairs.items(), ITEMS)], len(pairs))
            + "}"
        )
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return "[" + _some([cell(one) for one in items[:ITEMS]], len(items)) + "]"
    text = str(plain(value)).replace("\n", "\\n")
    return text if len(text) <= CELL else text[: CELL - 1] + "…"


def _some(shown: Sequence[str], count: int) -> str:
    return ", ".join(shown) + (f", … {count} in all" if count > len(shown) else "")


def _number(value: float) -> str:
    if not math.isfinite(value) or abs(value) < 1e5:
        return f"{value:.6g}"
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _field(value: Any) -> Any:
    """A value as CSV holds it."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict | list) else value


def _fitting(widths: Sequence[int], width: int) -> int:
    """How many columns, from the left, fit beside each other; at least one."""
    used = 0
    for place, one in enumerate(widths):
        used += one + (3 if place else 0)
        if used > width and place:
            return place
    return len(widths)


def _padded(text: str, width: int, to_right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if to_right else text + space


def _width(text: str) -> int:
    """Columns of a terminal that the text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
