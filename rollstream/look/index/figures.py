"""The figures of a run that several places show, as defined in
`rollstream/look/figures/definitions.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstream.storage.archive.run_rules import ENDINGS

if TYPE_CHECKING:  # imports DuckDB
    from rollstream.look.index.run_index import RunIndex
    from rollstream.look.monitor.sessions import RunSessions

SPAN = """
SELECT min(time_s) AS first, max(time_s) AS last FROM (
    SELECT min(started_s) AS time_s FROM t UNION ALL SELECT max(finished_s) FROM t
    UNION ALL SELECT unnest([min(time_s), max(time_s)]) FROM steps)
"""
TRAINED = """
SELECT coalesce(max(step), 0) AS step,
    coalesce(sum(metrics['tokens_trained']), 0)::BIGINT AS tokens_trained,
    avg(metrics['lag_consumed_mean']) AS lag_consumed_mean,
    max(metrics['lag_consumed_max']) AS lag_consumed_max
FROM steps
"""
REASONS = """
SELECT what, count(*) AS count FROM (
    SELECT ended || ': ' || coalesce(nullif(detail, ''), 'no detail') AS what FROM ended
    WHERE ended != 'trained'
    UNION ALL
    SELECT 'trajectory dead: ' || coalesce(nullif(reason, ''), 'no reason given') FROM t
    WHERE finish = 'dead'
) GROUP BY ALL ORDER BY count DESC, what LIMIT ?
"""
ROLLOUTS = """
SELECT rollout, max(rollout_term) AS term, count(*) AS trajectories, sum(tokens)::BIGINT AS tokens,
    count(*) FILTER (finish = 'length') AS cut, count(*) FILTER (finish = 'dead') AS dead
FROM t GROUP BY ALL ORDER BY ALL
"""
TASKS = """
SELECT task, count(*) AS trajectories, avg(reward) AS reward_mean,
    avg(tokens) FILTER (finish != 'dead') AS tokens_mean
FROM t GROUP BY ALL ORDER BY task LIMIT 100
"""


@dataclass(frozen=True, slots=True)
class RunTotals:
    """None where it is unknown. `first_s` and `last_s` are the first and last moment of work, in
    seconds since the epoch.
    """

    step: int = 0
    first_s: float | None = None
    last_s: float | None = None
    seconds: float = 0.0
    tokens_trained: int = 0
    tokens_per_s: float | None = None
    lag_consumed_mean: float | None = None
    lag_consumed_max: float | None = None


def run_span(index: "RunIndex") -> tuple[float, float] | None:
    """The first and last moment of work; None without any."""
    row = index.row(SPAN)
    return None if row is None or None in row.values() else (row["first"], row["last"])


def run_totals(index: "RunIndex", sessions: "RunSessions") -> RunTotals:
    """`sessions` are recorded by the run's supervisors."""
    span, trained = run_span(index), index.row(TRAINED)
    assert trained is not None
    seconds = sessions.run_s(*span, worked_s=step_times(index)) if span else 0.0
    tokens = trained["tokens_trained"]
    return RunTotals(
        step=trained["step"],
        first_s=span and span[0],
        last_s=span and span[1],
        seconds=seconds,
        tokens_trained=tokens,
        tokens_per_s=tokens / seconds if tokens and seconds else None,
        lag_consumed_mean=trained["lag_consumed_mean"],
        lag_consumed_max=trained["lag_consumed_max"],
    )


def step_times(index: "RunIndex") -> Sequence[float]:
    return index.columns("SELECT time_s FROM steps ORDER BY step")["time_s"]


def outcomes(index: "RunIndex") -> dict[str, int]:
    """Returns admitted groups, groups by their end, and open groups; the latter add up to the
    admitted ones (invariant 1). Groups whose admission is lost are in none.
    """
    counts: dict[str, int] = dict.fromkeys(("admitted", *ENDINGS, "open"), 0)
    rows = index.rows(
        "SELECT coalesce(ended, 'open') AS ended, count(*) AS count "
        'FROM admitted LEFT JOIN ended USING ("group") GROUP BY ALL'
    )
    for row in rows:
        counts[row["ended"]] = row["count"]
        counts["admitted"] += row["count"]
    return counts


def finishes(index: "RunIndex") -> dict[str, int]:
    rows = index.rows("SELECT finish, count(*) AS count FROM t GROUP BY ALL ORDER BY ALL")
    return {row["finish"]: row["count"] for row in rows}


def reasons(index: "RunIndex", limit: int) -> list[dict[str, Any]]:
    """Returns why groups and trajectories were not trained (`what`) and how often (`count`)."""
    return index.rows(REASONS, [limit])


def rollout_totals(index: "RunIndex") -> Mapping[str, dict[str, Any]]:
    """Returns trajectories and tokens of each rollout over all its terms."""
    return {row["rollout"]: row for row in index.rows(ROLLOUTS)}


def task_totals(index: "RunIndex") -> list[dict[str, Any]]:
    """Returns the trajectories, mean reward and mean tokens of each task."""
    return index.rows(TASKS)
