"""Answers `search`: trajectories that meet filters, in an order, page by page; and a search in
their texts, from the newest records to the oldest, which decodes tokens until a time bound and then
states where to continue.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np

from rollstream.look.explorer.answers.rows import select_rows, with_group_rewards
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.filters import (
    ORDERS,
    ROW,
    RowFilter,
    WrongRequest,
    limited,
    row_filter,
    text,
)
from rollstream.look.explorer.record_reader import TokenRow
from rollstream.streams.records import GENERATED, PROMPT

LIMIT_MAX = 200
# For decoding and matching texts in one request.
TEXT_S = 0.7
# Offsets whose tokens are read together.
WINDOW = 1024
# Characters shown on both sides of a match.
AROUND = 60
MATCH_MAX = 200
CHARACTERS_MAX = 200_000  # of one text that are searched


def search(run: ExploredRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Raises `WrongRequest` for a wrong filter, order or expression."""
    started = time.monotonic()
    chosen = row_filter(query)
    pattern = text(query, "q")
    page = _by_text(run, query, chosen, pattern) if pattern else _by_order(run, query, chosen)
    return {
        **page,
        "total": run.index.progress.trajectories,
        "seconds": round(time.monotonic() - started, 4),
        "index": run.index.progress.line(),
    }


def _mode_and_source(query: Mapping[str, str]) -> tuple[str, str]:
    mode, source = query.get("mode", "text"), query.get("in", "answer")
    if mode not in ("text", "re") or source not in ("answer", "prompt", "all"):
        raise WrongRequest("mode must be text or re, in one of answer, prompt, all")
    return mode, source


def _by_order(run: ExploredRun, query: Mapping[str, str], chosen: RowFilter) -> dict[str, Any]:
    order = query.get("order", "newest")
    if order not in ORDERS:
        raise WrongRequest(f"order must be one of {', '.join(ORDERS)}")
    # Without q they change nothing, and may still be wrong.
    _mode_and_source(query)
    limit = limited(query, LIMIT_MAX, 50)
    key = ORDERS[order]
    condition, parameters = chosen.condition, list(chosen.parameters)
    after = query.get("cursor")
    if after:
        value, _, name = after.partition("~")
        condition += f" AND ({key}, trajectory) > (?, ?)"
        parameters += [_float(value), name]
    rows = run.index.rows(
        f"SELECT {ROW}, {key} AS sorted FROM {chosen.source} WHERE {condition} "
        f"ORDER BY {key}, trajectory LIMIT {limit}", parameters
    )  # fmt: skip
    last = rows[-1] if len(rows) == limit else None
    after = None if last is None else f"{last['sorted']!r}~{last['trajectory']}"
    matched = run.index.value(
        f"SELECT count(*) FROM {chosen.source} WHERE {chosen.condition}", chosen.parameters
    )
    return {
        "rows": with_group_rewards(run, [_without(row, "sorted") for row in rows]),
        "matched": matched,
        "scanned": run.index.progress.trajectories,
        "next": after,
        "complete": True,
    }


def _float(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise WrongRequest("the cursor is not one of this search") from None


def _without(row: dict[str, Any], name: str) -> dict[str, Any]:
    row.pop(name)
    return row


@dataclass(slots=True)
class TextSearch:
    """Collects matches until `limit` rows or the time bound. `next` is where to continue."""

    limit: int
    until_s: float
    match: Callable[[Sequence[str]], list[tuple[int, int] | None]]
    source: str
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    scanned: int = 0
    next: str | None = None

    def is_over(self) -> bool:
        # Some texts are always searched, so that each request advances.
        is_late = self.scanned > 0 and time.monotonic() > self.until_s
        return len(self.rows) >= self.limit or is_late


def _by_text(
    run: ExploredRun, query: Mapping[str, str], chosen: RowFilter, pattern: str
) -> dict[str, Any]:
    if query.get("order", "newest") != "newest":
        raise WrongRequest("a search in texts has the order newest; leave out q or order")
    mode, source = _mode_and_source(query)
    if not run.text.is_known:
        raise WrongRequest("this run has no tokenizer.json, so its texts are unknown")
    match = _matcher(run, pattern, mode)
    text_search = TextSearch(
        limited(query, LIMIT_MAX, 50), time.monotonic() + TEXT_S, match, source
    )
    start, skipped = _cursor(query)
    for number, window in enumerate(_windows(run)):
        if number < start:
            continue
        if text_search.is_over():
            text_search.next = f"{number}.0"
            break
        searched = _search_window(run, chosen, text_search, window, skipped)
        if searched:
            text_search.next = f"{number}.{searched}"
            break
        skipped = 0
    return {
        "rows": text_search.rows,
        "matched": None,
        "scanned": text_search.scanned,
        "next": text_search.next,
        "complete": text_search.next is None,
    }


def _cursor(query: Mapping[str, str]) -> tuple[int, int]:
    # The window at which to continue, and how many of its rows were searched before.
    window, _, skipped = query.get("cursor", "0.0").partition(".")
    try:
        return int(window), int(skipped)
    except ValueError:
        raise WrongRequest("the cursor is not one of this search") from None


def _windows(run: ExploredRun) -> Iterator[tuple[int, int]]:
    ends = run.index.columns("SELECT p, max(o) AS last FROM t GROUP BY p ORDER BY p")
    firsts = [last // WINDOW for last in ends["last"]]
    # The newest windows of all partitions come first.
    for back in range(max(firsts, default=-1) + 1):
        for partition, first in zip(ends["p"], firsts, strict=True):
            if first - back >= 0:
                yield partition, (first - back) * WINDOW


def _search_window(
    run: ExploredRun,
    chosen: RowFilter,
    text_search: TextSearch,
    window: tuple[int, int],
    skipped: int,
) -> int:
    """Returns how many rows of the window were searched if some are left, else 0."""
    partition, first = window
    place = f"p = {partition} AND o >= {first} AND o < {first + WINDOW}"
    rows = select_rows(
        run, f"FROM {chosen.source} WHERE {place} AND {chosen.condition} ORDER BY o DESC",
        chosen.parameters,
    )  # fmt: skip
    if not rows[skipped:]:
        return 0
    low, high = rows[-1]["at"]["offset"], rows[0]["at"]["offset"]
    tokens = {
        token_row.offset: token_row for token_row in run.records.tokens(partition, low, high + 1)
    }
    for at in range(skipped, len(rows), 128):
        if text_search.is_over():
            return at
        some = [row for row in rows[at : at + 128] if row["at"]["offset"] in tokens]
        texts = [_text(run, tokens[row["at"]["offset"]], text_search.source) for row in some]
        text_search.scanned += len(some)
        for row, content, place_of in zip(some, texts, text_search.match(texts), strict=True):
            if place_of is not None:
                text_search.rows.append(row | {"match": _excerpt(content, *place_of)})
    return 0


def _text(run: ExploredRun, row: TokenRow, source: str) -> str:
    tokens = row.tokens
    if source != "all":
        token_source = GENERATED if source == "answer" else PROMPT
        tokens = tokens[np.asarray(row.sources) == token_source]
    return run.text.text(tokens[:CHARACTERS_MAX].tolist())[:CHARACTERS_MAX]


def _excerpt(content: str, start: int, end: int) -> dict[str, str]:
    return {
        "before": content[max(0, start - AROUND) : start],
        "text": content[start : min(end, start + MATCH_MAX)],
        "after": content[end : end + AROUND],
    }


def _matcher(
    run: ExploredRun, pattern: str, mode: str
) -> Callable[[Sequence[str]], list[tuple[int, int] | None]]:
    """Returns a function that gives for each text the place of the first match, or None."""
    if mode == "text":
        needle = re.compile(re.escape(pattern), re.IGNORECASE)

        def plain(texts: Sequence[str]) -> list[tuple[int, int] | None]:
            return [
                None if (m := needle.search(content)) is None else m.span() for content in texts
            ]

        return plain
    # The time of DuckDB's expressions (RE2) is linear in the text.
    query = "SELECT regexp_extract(x, ?) FROM (SELECT unnest(?::VARCHAR[]) AS x)"
    matches = "SELECT regexp_matches(x, ?) FROM (SELECT unnest(?::VARCHAR[]) AS x)"

    def expression(texts: Sequence[str]) -> list[tuple[int, int] | None]:
        cursor = run.index.cursor()
        hits = cursor.execute(matches, [pattern, list(texts)]).fetchall()
        parts = cursor.execute(query, [pattern, list(texts)]).fetchall()
        places: list[tuple[int, int] | None] = []
        for content, (hit,), (part,) in zip(texts, hits, parts, strict=True):
            start = content.find(part) if hit else -1
            places.append((start, start + len(part)) if hit else None)
        return places

    try:
        expression([""])
    except duckdb.Error as error:
        raise WrongRequest(f"not a regular expression: {str(error).splitlines()[0]}") from None
    return expression
