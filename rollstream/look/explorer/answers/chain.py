"""Reads how one trajectory came about (`read_chain`): assignments, partials, completion and takes
by time, as far as the log still holds them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.storage.archive.segments import LogRecord
from rollstream.streams.records import GENERATED, Assignment, Partial
from rollstream.streams.topics import partition_of
from rollstream.streams.values import Drafts, Span, join_drafts

# Clocks of writers differ by less.
BEFORE_S, AFTER_S = 2.0, 5.0
# The end of a trajectory that still runs.
OPEN_S = 1e9


@dataclass(frozen=True, slots=True)
class TokenSequence:
    tokens: NDArray[np.uint32]
    sources: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    spans: Sequence[Span]
    drafts: Drafts | None = None


@dataclass(slots=True)
class Chain:
    """The entries of a trajectory's chain, sorted by time. `complete` is False if the log lacks
    some. `running` are the tokens of its partials, None without any.
    """

    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    complete: bool = False
    running: TokenSequence | None = None
    _partials: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def waited(self, start: int, end: int) -> float | None:
        """Returns the seconds between the last partial before token `start` and the first one
        beyond token `end`.
        """
        before = [partial["time_s"] for partial in self._partials if partial["end"] <= start]
        after = [partial["time_s"] for partial in self._partials if partial["end"] > end]
        return max(0.0, min(after) - max(before)) if before and after else None

    def seconds(self, start: int, end: int) -> float | None:
        times = [p["time_s"] for p in self._partials if p["start"] < end and p["end"] > start]
        return max(times) - min(times) if len(times) > 1 else None


def read_chain(
    run: ExploredRun, name: str, row: Mapping[str, Any] | None, group: Mapping[str, Any] | None
) -> Chain:
    since_s = group["admitted_s"] if group else (row["started_s"] if row else None)
    if since_s is None:
        return Chain()
    # The log is read from the group's admission to the trajectory's end.
    until_s = row["appended_s"] + AFTER_S if row else OPEN_S + since_s
    since_s -= BEFORE_S
    spread = run.records.partitions("partials")
    place = partition_of(name.encode(), spread) if spread else None
    partials, has_partials = run.records.scan("partials", since_s, until_s, place)
    assigned, has_assignments = run.records.scan("assignments", since_s, until_s)
    mine = [part for part in partials if isinstance(part.record, Partial) and part.key == name]
    orders = [
        order for order in assigned if isinstance(order.record, Assignment) and order.key == name
    ]
    entries = [_assignment(message) for message in orders] + [_partial(message) for message in mine]
    chain = Chain(_partials=sorted(map(_partial, mine), key=lambda part: part["time_s"]))
    entries += _completion(row) + _takes(run, row)
    chain.entries = _with_waits(entries)
    chain.complete = has_partials and has_assignments
    chain.running = _tokens(mine, orders)
    return chain


def _with_waits(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered = sorted(entries, key=lambda event: event["time_s"])
    before_s: float | None = None
    for event in ordered:
        event["wait_s"] = None if before_s is None else max(0.0, event["time_s"] - before_s)
        before_s = event["time_s"]
    return ordered


def _assignment(message: LogRecord) -> dict[str, Any]:
    record = message.record
    assert isinstance(record, Assignment)
    return {
        "kind": "assignment",
        "what": record.kind,
        "attempt": record.attempt,
        "rollout": record.rollout,
        "rollout_term": record.rollout_term,
        "version": record.version.number,
        "moves": record.moves,
        "predicted": record.predicted,
        "onward": record.onward,
        "from_history": record.from_history,
        "from_partial": None if record.partial is None else _place(record.partial),
        "void": message.void,
        "time_s": message.time_s,
        "at": _place(message.address),
    }


def _partial(message: LogRecord) -> dict[str, Any]:
    record = message.record
    assert isinstance(record, Partial)
    return {
        "kind": "partial",
        "attempt": record.attempt,
        "rollout": record.rollout,
        "rollout_term": record.rollout_term,
        "start": record.start,
        "end": record.start + len(record.tokens),
        "tokens": len(record.tokens),
        "version": record.spans[-1].version.number if record.spans else None,
        "last": record.last,
        "time_s": message.time_s,
        "at": _place(message.address),
    }


def _completion(row: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if row is None:
        return []
    return [
        {
            "kind": "completion",
            "attempt": row["attempt"],
            "rollout": row["rollout"],
            "rollout_term": row["rollout_term"],
            "finish": row["finish"],
            "reason": row["reason"],
            "finished_s": row["finished_s"],
            "time_s": row["appended_s"],
            "at": row["at"],
        }
    ]


def _takes(run: ExploredRun, row: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if row is None:
        return []
    at = row["at"]
    # One take, unless an audit would object.
    return run.index.rows(
        "SELECT 'take' AS kind, k.step, k.\"update\", k.micro_batch, k.time_s, "
        "{'partition': k.p, 'offset': k.o} AS at FROM members m JOIN takes k "
        'USING (step, "update", micro_batch) WHERE m.p = ? AND m.o = ? LIMIT 8',
        [at["partition"], at["offset"]],
    )


def _tokens(partials: list[LogRecord], orders: list[LogRecord]) -> TokenSequence | None:
    pieces = [message.record for message in partials if isinstance(message.record, Partial)]
    starts = [message.record for message in orders if isinstance(message.record, Assignment)]
    if not pieces and not starts:
        return None
    prompt = starts[0].tokens if starts else np.zeros(0, np.uint32)
    tokens, sources = [prompt], [np.zeros(len(prompt), np.uint8)]
    logprobs: list[Any] = [np.zeros(0, np.float32)]
    spans: list[Span] = []
    at = len(prompt)
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.attempt)):
        if piece.start != at:
            # The partial is of another attempt, or its predecessor was truncated.
            continue
        tokens.append(piece.tokens)
        piece_sources = (
            piece.sources if len(piece.sources) else np.full(len(piece.tokens), GENERATED, np.uint8)
        )
        sources.append(piece_sources)
        logprobs.append(piece.logprobs)
        spans += piece.spans
        at += len(piece.tokens)
    return TokenSequence(
        np.concatenate(tokens),
        np.concatenate(sources),
        np.concatenate(logprobs),
        spans,
        join_drafts((len(piece.logprobs), piece.drafts) for piece in pieces),
    )


def _place(at: Any) -> dict[str, int]:
    return {"partition": at.partition, "offset": at.offset}
