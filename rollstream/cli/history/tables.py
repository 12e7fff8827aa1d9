"""Tables of weight versions and tensors for a terminal."""

import time
from collections.abc import Iterable

from rich.table import Table

from rollstream.cli.history.lines import VersionLine

UNITS = ("B", "kB", "MB", "GB", "TB")


def versions_table(lines: Iterable[VersionLine]) -> Table:
    table = plain_table("version", "kind", ">size", ">of full", ">delta", "created", "")
    for line in lines:
        if line["kind"] == "unfinished":
            table.add_row(str(line["version"]), "unfinished")
            continue
        table.add_row(
            str(line["version"]),
            str(line["kind"]),
            byte_size(line["bytes"]),
            _share(line["bytes"], line["full_bytes"]),
            byte_size(line["delta_bytes"]),
            time.strftime("%m-%d %H:%M:%S", time.localtime(float(line["created_s"] or 0))),
            "believed" if line["believed"] else "",
        )
    return table


def tensors_table(lines: Iterable[VersionLine]) -> Table:
    table = plain_table("tensor", "type", "coding", ">changed", ">delta")
    for line in lines:
        tied = f" = {line['tied']}" if line["tied"] else ""
        table.add_row(
            f"{line['tensor']}{tied}",
            f"{line['dtype']} {line['shape']}",
            " ".join(filter(None, (str(line["coding"] or "–"), str(line["values"] or "")))),
            _count(line["changed"]),
            byte_size(line["delta_bytes"]),
        )
    return table


def differences_table(lines: Iterable[VersionLine]) -> Table:
    table = plain_table("tensor", ">elements", ">changed", ">share", ">largest change")
    for line in lines:
        largest = line["largest"]
        table.add_row(
            str(line["tensor"]),
            _count(line["elements"]),
            _count(line["changed"]),
            _share(line["changed"], line["elements"]),
            "–" if largest is None else f"{float(largest):.3g}",
        )
    return table


def plain_table(*columns: str) -> Table:
    """Returns a table without frame; columns whose name starts with > are right-aligned."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        justify, folds = "right" if right else "left", column == "tensor"
        table.add_column(
            column.removeprefix(">"), justify=justify, no_wrap=not folds, overflow="fold"
        )
    return table


def _count(number: str | int | float | None) -> str:
    return "–" if number is None else f"{int(number):,}"


def byte_size(count: str | int | float | None) -> str:
    """Formats a size in powers of 1000 bytes."""
    if count is None:
        return "–"
    size, unit = float(count), 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {UNITS[unit]}" if size < 999.5 else f"{size:.0f} {UNITS[unit]}"


def _share(part: str | int | float | None, whole: str | int | float | None) -> str:
    return f"{float(part or 0) / max(1.0, float(whole or 0)):.1%}"
