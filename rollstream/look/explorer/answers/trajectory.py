"""Answers `trajectories/{name}`: the text of one trajectory token by token, with the version, the
lag, the log-probability, the source and the training of each, its turns, and how it came about.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.errors import ObjectMissing
from rollstream.look.explorer.answers.chain import Chain, TokenSequence, read_chain
from rollstream.look.explorer.answers.groups import ReadGroup, groups_of, read_group
from rollstream.look.explorer.answers.rows import with_group_rewards
from rollstream.look.explorer.answers.token_scores import ShownScores, shown_scores
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.filters import limited, whole
from rollstream.look.report.chart import Chart, Series, draw_chart
from rollstream.look.report.elements import PageElement
from rollstream.streams.branches import branch_depths
from rollstream.streams.records import ENVIRONMENT, GENERATED, PROMPT, Annotation, Trajectory
from rollstream.streams.values import Span, accepted_mask, accepted_tokens

TOKENS_MAX = 20_000
KINDS = {PROMPT: "prompt", GENERATED: "generated", ENVIRONMENT: "environment"}


def show_trajectory(run: ExploredRun, name: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Raises `ObjectMissing` if no group admitted such a trajectory."""
    where = run.index.row('SELECT "group" FROM t WHERE trajectory = ?', [name])
    where = where or run.index.row(
        'SELECT "group" FROM admitted WHERE list_contains(names, ?)', [name]
    )
    if where is None:
        raise ObjectMissing(f"no trajectory {name[:200]!r} in this run")
    group = int(where["group"])
    read = read_group(run, group)
    rows = with_group_rewards(run, [row for row in read.rows if row["trajectory"] == name])
    row, record = next(iter(rows), None), read.records.get(name)
    group_rows = groups_of(run, [group])
    chain = read_chain(run, name, row, group_rows[0] if group_rows else None)
    sequence = _sequence(record, chain)
    page = _page(query, len(sequence.tokens))
    scores = shown_scores(run, record)
    return {
        "trajectory": name,
        "row": row,
        "group": group_rows[0] if group_rows else None,
        "running": record is None,
        **_token_part(run, sequence, row, read, name, scores, page),
        **_facts(record),
        "chain": chain.entries,
        "chain_complete": chain.complete,
        "turns": _turns(sequence, chain, record),
        "annotations": run.index.rows(
            "SELECT name, value, count AS values, scorer, reason, time_s FROM noted "
            "WHERE trajectory = ? ORDER BY name LIMIT 100", [name]
        ),
        "completions": len({name} & {row["trajectory"] for row in read.rows}),
        "neighbours": _neighbours(run, group, name),
        "missing": scores.missing,
    }  # fmt: skip


def _page(query: Mapping[str, str], total: int) -> tuple[int, int]:
    start = max(0, min(total, whole(query, "from", 0)))
    return start, min(total, start + limited(query, TOKENS_MAX, TOKENS_MAX))


def _sequence(record: Trajectory | None, chain: Chain) -> TokenSequence:
    if record is not None:
        return TokenSequence(
            record.tokens, record.sources, record.logprobs, record.spans, record.drafts
        )
    # Tokens of a trajectory that still runs are joined from the partials in the log.
    return chain.running or TokenSequence(
        np.zeros(0, np.uint32), np.zeros(0, np.uint8), np.zeros(0, np.float32), ()
    )


def _token_part(
    run: ExploredRun,
    sequence: TokenSequence,
    row: Mapping[str, Any] | None,
    read: ReadGroup,
    name: str,
    scores: ShownScores,
    page: tuple[int, int],
) -> dict[str, Any]:
    generated = np.flatnonzero(sequence.sources == GENERATED)
    count = len(generated)
    step = None if row is None else row["step"]
    base = step - 1 if step is not None else (row["trainer_version"] if row else None)
    sample = read.samples.get(name)
    mask = None if sample is None else sample.mask
    columns: dict[str, Any] = {
        "logprob": _spread(sequence, np.round(sequence.logprobs.astype(float), 5).tolist()),
        "version": _spread(sequence, _by_span(sequence, count, lambda s: s.version.number)),
        "lag": [None] * len(sequence.tokens)
        if base is None
        else _spread(
            sequence, _by_span(sequence, count, lambda s: max(0, base - s.version.number))
        ),
        "accepted": None
        if sequence.drafts is None
        else _spread(sequence, accepted_mask(sequence.drafts, count).astype(int).tolist()),
        "mask": None if mask is None else _spread(sequence, mask.astype(int).tolist()),
        "entropy": scores.entropy and _spread(sequence, scores.entropy),
        "mismatch": scores.mismatch and _spread(sequence, scores.mismatch),
    }
    start, end = page
    ids = sequence.tokens[start:end].tolist()
    tokens = {name: column and column[start:end] for name, column in columns.items()}
    return {
        "total": len(sequence.tokens),
        "prompt_tokens": int(np.count_nonzero(sequence.sources == PROMPT)),
        "from": start,
        "cut": end < len(sequence.tokens),
        "tokens": {
            "id": ids,
            "piece": run.text.pieces(ids),
            "source": sequence.sources[start:end].tolist(),
            **tokens,
            "advantage": None if sample is None else sample.known_advantage,
            "strips": _strips(run, sequence, name, page),
        },
        "versions": _versions(sequence, generated, base, mask),
        "confidence": _confidence(columns["logprob"]) if start == 0 else [],
    }


def _confidence(logprobs: Sequence[float | None]) -> list[PageElement]:
    """Returns the curve of the tokens' log-probabilities."""
    points = [(float(at), value) for at, value in enumerate(logprobs) if value is not None]
    series = Series("log-probability", points, 2)
    chart = Chart("Log-probability by token", (series,), form=".3f", low=None, along="token")
    return [draw_chart(chart)] if len(points) > 2 else []


def _spread(sequence: TokenSequence, values: Sequence[Any]) -> list[Any]:
    """Returns a list with one item per token: the values of generated tokens, None for others."""
    column: list[Any] = [None] * len(sequence.tokens)
    places = np.flatnonzero(sequence.sources == GENERATED).tolist()
    for place, value in zip(places, values, strict=False):
        column[place] = value
    return column


def _by_span(sequence: TokenSequence, count: int, value: Callable[[Span], int]) -> list[Any]:
    column: list[Any] = [None] * count
    for span in sequence.spans:
        column[span.start : span.end] = [value(span)] * (span.end - span.start)
    return column[:count]


def _versions(
    sequence: TokenSequence,
    generated: NDArray[np.int64],
    base: int | None,
    mask: NDArray[np.bool_] | None,
) -> list[dict[str, Any]]:
    version_rows: list[dict[str, Any]] = []
    for span in sequence.spans:
        if span.start >= len(generated):
            continue
        last = min(span.end, len(generated)) - 1
        masked = mask is not None and not mask[span.start : span.end].any()
        version_rows.append(
            {
                "version": span.version.number,
                "term": span.version.term,
                "start": int(generated[span.start]),
                "end": int(generated[last]) + 1,
                "tokens": span.end - span.start,
                "lag": None if base is None else max(0, base - span.version.number),
                "masked": masked,
            }
        )
    return version_rows


def _strips(
    run: ExploredRun, sequence: TokenSequence, name: str, page: tuple[int, int]
) -> dict[str, list[Any]]:
    count = len(sequence.logprobs)
    rows = run.index.rows(
        # Annotations with one value per generated token.
        "SELECT p, o FROM noted WHERE trajectory = ? AND count = ? AND count > 1 LIMIT 8",
        [name, count],
    )
    strips: dict[str, list[Any]] = {}
    for row in rows:
        message = run.records.record("annotations", row["p"], row["o"])
        if message is not None and isinstance(message.record, Annotation):
            values = np.round(message.record.values.astype(float), 5).tolist()
            strips[message.record.name] = _spread(sequence, values)[page[0] : page[1]]
    return strips


def _facts(record: Trajectory | None) -> dict[str, Any]:
    drafts = None if record is None else record.drafts
    return {
        "scores": {} if record is None else record.scores or {},
        "environment": "" if record is None else record.environment,
        "reference": "" if record is None else record.reference,
        "temperature": None if record is None else record.temperature,
        "predicted": None if record is None else record.predicted,
        "drafts": None
        if drafts is None
        else {
            "steps": drafts.steps,
            "guessed": drafts.guessed,
            "accepted": accepted_tokens(drafts),
            "asked": drafts.asked,
            "found": drafts.found,
            "lookup_s": drafts.lookup_s,
        },
    }


def _turns(
    sequence: TokenSequence, chain: Chain, record: Trajectory | None
) -> list[dict[str, Any]]:
    """Returns the runs of tokens of one source, cut where a turn of an agent begins, with the
    number of forks on its path (`depth`), the cause of a fork (`fork`) where one begins, and
    whether it is `abandoned` and so not trained.
    """
    if not len(sequence.sources):
        return []
    turns = () if record is None else record.turns
    branches = () if record is None else record.branches
    starts, depths = [turn.start for turn in turns], branch_depths(turns, branches)
    changes = (np.flatnonzero(np.diff(sequence.sources)) + 1).tolist()
    edges = sorted({0, *starts, *changes, len(sequence.sources)})
    turn_rows: list[dict[str, Any]] = []
    for start, end in pairwise(edges):
        kind = KINDS.get(int(sequence.sources[start]), "environment")
        # An environment's turn waits from the last partial before it to the first one after it.
        waited = chain.waited(start, end) if kind == "environment" else None
        turn_row = {
            "kind": kind, "start": start, "end": end, "text_tokens": end - start,
            "seconds": chain.seconds(start, end), "wait_s": waited, "depth": 0, "fork": "",
            "abandoned": False,
        }  # fmt: skip
        # A turn of an agent's episode has its times in the record.
        number = bisect_right(starts, start) - 1
        if number >= 0:
            turn = turns[number]
            is_first = start == turn.start
            turn_row |= {
                "depth": depths[number],
                "fork": turn.fork if is_first else "",
                "abandoned": record is not None and number in record.abandoned,
                "wait_s": turn.waiting_s if is_first else None,
                "seconds": turn.generating_s if kind == "generated" else None,
            }
        turn_rows.append(turn_row)
    return turn_rows


def _neighbours(run: ExploredRun, group: int, name: str) -> dict[str, str | None]:
    names: list[str] = []
    for row in run.index.rows(
        'SELECT names FROM admitted WHERE "group" BETWEEN ? AND ? ORDER BY "group"',
        [group - 1, group + 1],
    ):
        names += row["names"]
    if name not in names:
        return {"previous": None, "next": None}
    at = names.index(name)
    return {
        "previous": names[at - 1] if at else None,
        "next": names[at + 1] if at + 1 < len(names) else None,
    }
