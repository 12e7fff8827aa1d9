"""Formats values as short texts, bars and tables for the terminal. Pure functions."""

from collections.abc import Sequence

from rich.table import Table

SPARKS = "▁▂▃▄▅▆▇█"
# Width of a sparkline, unless the caller sets another.
SPARK_COLUMNS = 24
UNITS = ("B", "kB", "MB", "GB", "TB")
# Thousands separator that prevents a line break inside a number.
GAP = "\N{NO-BREAK SPACE}"


def clock(seconds: float) -> str:
    """Formats a duration: `2:05`, `1:02:05`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def age(seconds: float) -> str:
    """`0.4 s`, `42 s`, `12:31`, `3:02:05`, `5 d 3 h`."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}{GAP}s"
    if seconds < 99.5:
        return f"{seconds:.0f}{GAP}s"
    if seconds < 48 * 3600:
        return clock(seconds)
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days}{GAP}d{GAP}{hours}{GAP}h"


def count(value: float) -> str:
    """Returns groups of three digits: `12 345`."""
    return f"{value:,.0f}".replace(",", GAP)


def plural(number: int, word: str) -> str:
    """`1 move`, `2 moves`."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"


def short_number(value: float) -> str:
    """Returns at most four columns: `940`, `9.4k`, `12k`, `4.1M`."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.0f}{unit}" if not unit or value >= 9.95 else f"{value:.1f}{unit}"


def byte_size(count: str | int | float | None) -> str:
    """Returns the byte size in powers of 1000 bytes; None becomes `–`."""
    if count is None:
        return "–"
    size, unit = float(count), 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {UNITS[unit]}" if size < 999.5 else f"{size:.0f} {UNITS[unit]}"


def share(value: float) -> str:
    """0.61 is `61%`; a positive value below 0.005 is `<1%`."""
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def sparkline(values: Sequence[float], columns: int = SPARK_COLUMNS) -> str:
    """A bar for each of the last `columns` values; "" for fewer than two."""
    shown = values[-columns:]
    if len(shown) < 2:
        return ""
    # The scale covers all values, so it does not jump as the window moves.
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / max(1e-9, high - low)
    return "".join(SPARKS[round((value - low) * scale)] for value in shown)


def meter(used: float, total: float, columns: int) -> str:
    full = round(columns * max(0.0, min(1.0, used / max(1e-9, total))))
    return "█" * full + "░" * (columns - full)


def shortened(text: str, columns: int) -> str:
    """Cuts a text above `columns` characters in the middle: names differ at the ends."""
    if len(text) <= columns:
        return text
    head = (columns - 1) // 2
    return f"{text[:head]}…{text[len(text) - (columns - 1 - head) :]}"


def plain_text(text: str, columns: int = 200) -> str:
    """One line of at most `columns` characters, without control characters."""
    # Text from outside could move the cursor by control characters.
    spaced = " ".join(text.split())
    return shortened("".join(c if c.isprintable() else "?" for c in spaced), columns)


def wrap_parts(parts: Sequence[str], columns: int) -> list[str]:
    """Joined by ` · ` into lines of at most `columns` characters, if no part is longer."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= columns:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def plain_table(*columns: str) -> Table:
    """Returns the plain table without frame. A column whose name starts with > is right-aligned;
    only the column `tensor` breaks long values into several lines.
    """
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        justify, folds = "right" if right else "left", column == "tensor"
        table.add_column(
            column.removeprefix(">"), justify=justify, no_wrap=not folds, overflow="fold"
        )
    return table
