"""The whole history of a run (`RunHistory`), from which its report is made: read once from the
run's index (`history_of`), from the metrics files and from a tail of the log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollstream.look.index.figures import (
    RunTotals,
    finishes,
    outcomes,
    reasons,
    rollout_totals,
    run_totals,
    task_totals,
)
from rollstream.look.monitor.groups import Intervals
from rollstream.look.monitor.samples import DraftTotals, PassDrafts
from rollstream.look.monitor.sessions import RunSessions
from rollstream.look.monitor.snapshot import RunSnapshot, RunWarning
from rollstream.look.monitor.state import RequestMove, RunState
from rollstream.look.report.untrained import (
    DropComparison,
    EpisodeComparison,
    compare_dropped,
    compare_episodes,
)
from rollstream.streams.records import StepDone
from rollstream.streams.values import Version

if TYPE_CHECKING:  # imports DuckDB
    from rollstream.look.index.run_index import RunIndex

# Shorter pauses of a rollout are invisible in a chart of minutes.
JOINED_S = 0.05
REASONS_MAX = 20

BUSY = f"""
SELECT rollout, min(started_s) AS start, max(finished_s) AS end FROM (
    SELECT *, sum(begins) OVER (PARTITION BY rollout ORDER BY started_s, finished_s
        ROWS UNBOUNDED PRECEDING) AS period
    FROM (SELECT rollout, started_s, finished_s, coalesce(started_s - {JOINED_S} > max(finished_s)
            OVER (PARTITION BY rollout ORDER BY started_s, finished_s
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false)::INT AS begins FROM t)
) GROUP BY rollout, period ORDER BY rollout, start
"""
# Records do not name the pass over the prompts: the first group of a prompt is of pass 1, its
# second of pass 2.
DRAFTS = """
SELECT pass, task, sum(tokens)::BIGINT, sum(passes)::BIGINT, sum(guessed)::BIGINT,
    coalesce(sum(accepted), 0)::BIGINT, sum(asked)::BIGINT, sum(found)::BIGINT, sum(lookup_s)
FROM (SELECT *, dense_rank() OVER (PARTITION BY prompt_hash ORDER BY "group") AS pass
    FROM t WHERE passes IS NOT NULL)
GROUP BY pass, task ORDER BY pass, task
"""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A rollout, in its `term`, serves a version from `time_s` (seconds since the epoch) on."""

    time_s: float
    version: int
    term: int


@dataclass(slots=True)
class RolloutHistory:
    """One rollout over all its terms. `busy` are the times in which it generated; `cut` and `dead`
    count its trajectories that reached the limit of tokens, and that died.
    """

    busy: Intervals = field(default_factory=lambda: Intervals(JOINED_S))
    serving: list[ServedVersion] = field(default_factory=list[ServedVersion])
    idle_s: float = 0.0
    trajectories: int = 0
    tokens: int = 0
    cut: int = 0
    dead: int = 0


@dataclass(slots=True)
class RunHistory:
    """`state` is a tail of the run, for its restarts and warnings; everything else is of the whole
    run. `configuration` maps dotted keys to values, `warmup` is the content of `warmup.json`,
    `evaluations` and `events` are the lines of `eval.jsonl` and `supervisor.jsonl`, `concerns` the
    warnings at the newest record. `steps` has the newest record of each step.
    """

    state: RunState = field(default_factory=RunState)
    configuration: Mapping[str, Any] = field(default_factory=dict[str, Any])
    forked_from: str = ""
    warmup: Mapping[str, Any] = field(default_factory=dict[str, Any])
    evaluations: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    moves: Sequence[RequestMove] = ()
    concerns: Sequence[RunWarning] = ()
    sessions: RunSessions = field(default_factory=RunSessions)
    figures: RunTotals = field(default_factory=RunTotals)
    steps: dict[int, StepDone] = field(default_factory=dict[int, StepDone])
    rollouts: dict[str, RolloutHistory] = field(default_factory=dict[str, RolloutHistory])
    outcomes: Mapping[str, int] = field(default_factory=lambda: {"admitted": 0})
    finishes: Mapping[str, int] = field(default_factory=dict[str, int])
    tasks: Sequence[Mapping[str, Any]] = ()
    reasons: Sequence[tuple[str, int]] = ()
    dropped: DropComparison = field(default_factory=DropComparison)
    episodes: EpisodeComparison = field(default_factory=EpisodeComparison)
    drafts: Sequence[PassDrafts] = ()
    """By pass over the prompts and task, in ascending order."""
    live: RunSnapshot | None = None
    """Where the run stands now, in the explorer."""
    is_tail: bool = False
    """The run's first records were truncated and not archived."""

    def deaths(self) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event.get("event") == "death"]

    def metric(self, name: str) -> list[tuple[float, float]]:
        return [
            (float(step), done.metrics[name])
            for step, done in sorted(self.steps.items())
            if name in done.metrics
        ]

    def evaluated(self, name: str) -> list[tuple[float, float]]:
        lines = (line for line in self.evaluations if line.get(name) is not None)
        return sorted((float(line["step"]), float(line[name])) for line in lines)

    def run_s(self, begin_s: float, end_s: float) -> float:
        """Returns the seconds between two times without the pauses of the run."""
        return self.sessions.run_s(begin_s, end_s, [done.time_s for done in self.steps.values()])


def history_of(
    index: "RunIndex",
    events: Sequence[Mapping[str, Any]] = (),
    idle_s: Mapping[str, float] = {},
    with_drafts: bool = True,
) -> RunHistory:
    """Returns what the index has of a run; `events` are the lines of `supervisor.jsonl`, `idle_s`
    the idle seconds of each rollout. Passes of drafts are known if the index has prompts.
    """
    sessions = RunSessions()
    for event in events:
        if isinstance(event.get("time_s"), int | float):
            sessions.apply(event)
    return RunHistory(
        events=events,
        sessions=sessions,
        figures=run_totals(index, sessions),
        steps=_steps(index),
        rollouts=_rollouts(index, idle_s),
        outcomes=outcomes(index),
        finishes=finishes(index),
        tasks=task_totals(index),
        reasons=[(row["what"], row["count"]) for row in reasons(index, REASONS_MAX)],
        dropped=compare_dropped(index),
        episodes=compare_episodes(index),
        drafts=_drafts(index) if with_drafts else (),
    )


def _drafts(index: "RunIndex") -> list[PassDrafts]:
    return [
        PassDrafts(number, task, DraftTotals(*totals))
        for number, task, *totals in index.cursor().execute(DRAFTS).fetchall()
    ]


def _steps(index: "RunIndex") -> dict[int, StepDone]:
    rows = index.cursor().execute(
        "SELECT step, version, version_term, state_hash, takes, metrics, counts, time_s, "
        "weights_hash FROM steps ORDER BY step"
    )
    return {
        step: StepDone(
            step, Version(number, term), state, takes, metrics, counts, time_s, weights_hash=weights
        )
        for step, number, term, state, takes, metrics, counts, time_s, weights in rows.fetchall()
    }


def _rollouts(index: "RunIndex", idle_s: Mapping[str, float]) -> dict[str, RolloutHistory]:
    rollouts = {
        name: RolloutHistory(
            trajectories=row["trajectories"], tokens=row["tokens"], cut=row["cut"], dead=row["dead"]
        )
        for name, row in rollout_totals(index).items()
    }
    for name, seconds in idle_s.items():
        rollouts.setdefault(name, RolloutHistory()).idle_s = seconds
    for row in index.rows("SELECT rollout, time_s, version, rollout_term AS term FROM served"):
        serving = ServedVersion(row["time_s"], row["version"], row["term"])
        rollouts.setdefault(row["rollout"], RolloutHistory()).serving.append(serving)
    for name, start, end in index.cursor().execute(BUSY).fetchall():
        rollouts[name].busy.starts.append(start)
        rollouts[name].busy.ends.append(end)
    return rollouts
