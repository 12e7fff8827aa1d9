"""Reads how one trajectory came about (`read_chain`): its assignments, partials, completion and
takes in the order of time, as far as the log still holds them, each with the wait before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.explorer.explored_run import ExploredRun
from rollstream.storage.archive.segments import LogRecord
from rollstream.streams.records import GENERATED, Assignment, Partial
from rollstream.streams.topics import partition_of
from rollstream.streams.values import Drafts, Span, join_drafts

BEFORE_S, AFTER_S = 2.0, 5.0  # clocks of writers differ by less
OPEN_S = 1e9  # the end of a trajectory that still runs


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Holds the tokens of a trajectory, finished or running, as arrays."""

    tokens: NDArray[np.uint32]
    sources: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    spans: Sequence[Span]
    drafts: Drafts | None = None


@dataclass(slots=True)
class Chain:
    """Holds the entries of a trajectory's chain, sorted by time. `complete` is False if the log
    lacks some. `running` are the tokens of its partials, None without any.
    """

    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    complete: bool = False
    running: TokenSequence | None = None
    _partials: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def waited(self, start: int, end: int) -> float | None:
        """Returns the seconds between the last partial before token `start` and the first one that
        reaches beyond token `end`.
        """
        before = [one["time_s"] for one in self._partials if one["end"] <= start]
        after = [one["time_s"] for one in self._partials if one["end"] > end]
        return max(0.0, min(after) - max(before)) if before and after else None

    def seconds(self, start: int, end: int) -> float | None:
        """Returns the seconds from the first to the last partial within the tokens."""
        times = [p["time_s"] for p in self._partials if p["start"] < end and p["end"] > start]
        return max(times) - min(times) if len(times) > 1 else None


def read_chain(
    run: ExploredRun, name: str, row: Mapping[str, Any] | None, group: Mapping[str, Any] | None
) -> Chain:
    """Returns the chain of a trajectory. The log is read from its group's admission to its end."""
    since_s = group["admitted_s"] if group else (row["started_s"] if row else None)
    if since_s is None:
        return Chain()
    until_s = row["appended_s"] + AFTER_S if row else OPEN_S + since_s
    since_s -= BEFORE_S
    spread = run.records.partitions("partials")
    place = partition_of(name.encode(), spread) if spread else None
    partials, has_partials = run.records.scan("partials", since_s, until_s, place)
    assigned, has_assignments = run.records.scan("assignments", since_s, until_s)
    mine = [one for one in partials if isinstance(one.record, Partial) and one.key == name]
    orders = [one for one in assigned if isinstance(one.record, Assignment) and one.key == name]
    entries = [_assignment(one) for one in orders] + [_partial(one) for one in mine]
    chain = Chain(_partials=sorted(map(_partial, mine), key=lambda one: one["time_s"]))
    entries += _completion(row) + _takes(run, row)
    chain.entries = _with_waits(entries)
    chain.complete = has_partials and has_assignments
    chain.running = _tokens(mine, orders)
    return chain


def _with_waits(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered = sorted(entries, key=lambda one: one["time_s"])
    before_s: float | None = None
    for one in ordered:
        one["wait_s"] = None if before_s is None else max(0.0, one["time_s"] - before_s)
        before_s = one["time_s"]
    return ordered


def _assignment(one: LogRecord) -> dict[str, Any]:
    record = one.record
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
        "void": one.void,
        "time_s": one.time_s,
        "at": _place(one.address),
    }


def _partial(one: LogRecord) -> dict[str, Any]:
    record = one.record
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
        "time_s": one.time_s,
        "at": _place(one.address),
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
    """Returns the takes that train the completion; one, unless an audit would object."""
    if row is None:
        return []
    at = row["at"]
    return run.index.rows(
        "SELECT 'take' AS kind, k.step, k.\"update\", k.micro_batch, k.time_s, "
        "{'partition': k.p, 'offset': k.o} AS at FROM members m JOIN takes k "
        'USING (step, "update", micro_batch) WHERE m.p = ? AND m.o = ? LIMIT 8',
        [at["partition"], at["offset"]],
    )


def _tokens(partials: list[LogRecord], orders: list[LogRecord]) -> TokenSequence | None:
    """Returns the tokens of the newest attempt that has partials, after those of the prompt."""
    found = [one.record for one in partials if isinstance(one.record, Partial)]
    starts = [one.record for one in orders if isinstance(one.record, Assignment)]
    if not found and not starts:
        return None
    prompt = starts[0].tokens if starts else np.zeros(0, np.uint32)
    tokens, sources = [prompt], [np.zeros(len(prompt), np.uint8)]
    logprobs: list[Any] = [np.zeros(0, np.float32)]
    spans: list[Span] = []
    at = len(prompt)
    for one in sorted(found, key=lambda one: (one.start, one.attempt)):
        if one.start != at:
            continue  # of another attempt, or its predecessor was truncated
        tokens.append(one.tokens)
        given = one.sources if len(one.sources) else np.full(len(one.tokens), GENERATED, np.uint8)
        sources.append(given)
        logprobs.append(one.logprobs)
        spans += one.spans
        at += len(one.tokens)
    return TokenSequence(
        np.concatenate(tokens),
        np.concatenate(sources),
        np.concatenate(logprobs),
        spans,
        join_drafts((len(one.logprobs), one.drafts) for one in found),
    )


def _place(at: Any) -> dict[str, int]:
    return {"partition": at.partition, "offset": at.offset}
