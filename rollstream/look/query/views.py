"""All views of `rollstream query`: base views, which hold every row unfiltered, and derived ones,
which hold only valid rows: no void records (invariant 7), no undecodable bytes, and of a
trajectory's completions the first in its group's partition (invariant 2).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rollstream.look.query.fate_views import BIAS, FATES, PASS_AT_K
from rollstream.storage.archive import run_rules

METRICS = (
    "reward_mean", "accuracy", "loss", "entropy", "kl", "ess", "clipped", "ratio_max",
    "gradient_norm", "learning_rate", "length_median", "length_p99", "lag_finish_mean",
    "lag_finish_max", "lag_consumed_mean", "lag_consumed_max", "tokens_trained", "seconds",
    "wait_s", "busy_s",
)  # fmt: skip
"""Those that are columns of `steps`; its map `metrics` holds all."""


MISPLACED = "misplaced_groups"
"""Pairs (group, partition) of completions in a partition to which the group's key does not belong.
Trainer, dispatch, audit and the derived views ignore these.
"""


@dataclass(frozen=True, slots=True)
class SqlView:
    """A `sentence` for the user, the views that its query `needs`, and its `query` (empty for a
    base view).
    """

    name: str
    sentence: str
    needs: tuple[str, ...] = ()
    query: str = ""


# The views read a list column (tokens, spans) only for a query of something computed from it, so a
# million rows are counted without reading tokens.
_COMPLETIONS = f"""
SELECT trajectories.* FROM trajectories SEMI JOIN {
    run_rules.first_completions(
        f'(FROM trajectories ANTI JOIN {MISPLACED} USING ("group", partition))'
    )
} USING (partition, "offset")
"""

_SCORES = f"""
SELECT trajectory, name, scorer, value, reason, timestamp AS written
FROM {run_rules.first_annotations("annotations", "(SELECT process_rewards FROM settings)")}
"""

_REWARDS = """
SELECT c.trajectory, c."group", c.index, c.task,
       coalesce(s.value, c.reward) AS reward,
       CASE WHEN s.value IS NOT NULL THEN 'annotation'
            WHEN c.reward IS NOT NULL THEN 'record' END AS source,
       c.finish, c.rollout, c.spans[1].version.number AS version,
       len(c.logprobs) AS tokens, c.wave, c.moves,
       c.started_s, c.finished_s, c.finished_s - c.started_s AS seconds
FROM completions c
LEFT JOIN (SELECT trajectory, value FROM scores WHERE name = 'reward') s USING (trajectory)
"""

_EFFECTIVE = run_rules.effective_takes("ledger")
_TAKES = f"""
SELECT step, update, micro_batch, term, timestamp AS taken, len(members) AS trajectories,
       len(groups) AS groups, len(annotations) AS annotations, "offset"
FROM {_EFFECTIVE}
"""

_TRAINED = f"""
SELECT trajectory, step, update, micro_batch, term, timestamp AS taken, partition, "offset", hash
FROM {run_rules.members(_EFFECTIVE)}
"""

_STEPS = f"""
SELECT step, term, CASE WHEN abs(time_s) < 6e10 THEN to_timestamp(time_s) END AS done,
       version.number AS version, takes,
       {", ".join(f"metrics['{name}'] AS {name}" for name in METRICS)},
       metrics, counts, state_hash
FROM ledger WHERE {run_rules.valid("step_done/1")} QUALIFY {run_rules.newest_step()}
ORDER BY step
"""

_ENDS = run_rules.first_ends(run_rules.group_ends("ledger"), run_rules.poisoned_groups("ledger"))
_GROUPS = f"""
SELECT a."group", a.wave, len(a.trajectories) AS trajectories,
       coalesce(nullif(a.needed, 0), len(a.trajectories)) AS needed,
       CASE WHEN a.needed > 0 THEN len(a.trajectories) - len(e.members) ELSE 0 END AS released,
       a.timestamp AS admitted,
       coalesce(e.ended, 'open') AS ended, e.detail, e.step, e.timestamp AS ended_at,
       epoch(e.timestamp - a.timestamp) AS seconds, a.deadline_s
FROM (SELECT * FROM admissions WHERE {run_rules.valid("admitted/1")}
    QUALIFY {run_rules.first_admission()}) a LEFT JOIN {_ENDS} e USING ("group")
ORDER BY a."group"
"""

_SPANS = f"""
SELECT s.trajectory, s."group", s.span.start AS start, s.span."end" AS "end",
       s.span."end" - s.span.start AS tokens,
       s.span.version.number AS version, s.span.version.term AS term, s.rollout,
       {run_rules.lag("s.newest", "s.span.version.number")} AS lag_finish,
       {run_rules.lag_consumed("s.span.version.number")} AS lag_consumed, t.step,
       lag_consumed > (SELECT max_lag FROM settings) AS masked,
       {run_rules.abandoned_tokens("s.span", "s.left_out")} AS abandoned
FROM (
    SELECT trajectory, "group", rollout, trainer_version.number AS newest, unnest(spans) AS span,
           {run_rules.ABANDONED_RANGES} AS left_out
    FROM completions
) s
LEFT JOIN (SELECT trajectory, min(step) AS step FROM trained GROUP BY trajectory) t
USING (trajectory)
"""

_LAG = """
SELECT step, lag_consumed AS lag, sum(tokens - abandoned)::BIGINT AS tokens,
       count(DISTINCT trajectory) AS trajectories
FROM spans WHERE step IS NOT NULL AND masked IS NOT TRUE
GROUP BY ALL ORDER BY step, lag
"""

_DRAFTS = f"""
SELECT trajectory, "group", index, task,
       dense_rank() OVER (
           PARTITION BY {run_rules.PROMPT_HASH} ORDER BY "group"
       ) AS pass,
       len(logprobs) AS tokens, drafts.steps AS steps, drafts.guessed AS guessed,
       coalesce({run_rules.ACCEPTED}, 0)::BIGINT AS accepted,
       drafts.asked AS asked, drafts.found AS found, drafts.lookup_s AS lookup_s
FROM completions WHERE drafts IS NOT NULL
"""

_EPISODES = """
SELECT c.trajectory, c."group", c.index, c.task, c.finish, c.reason_ AS reason, r.reward,
       len(c.turns) AS turns,
       coalesce(len(list_filter(c.turns, lambda t: t.fork <> '')), 0) AS branches,
       coalesce(len(c.abandoned), 0) AS abandoned,
       list_sum(list_transform(c.turns, lambda t: t.waiting_s)) AS waiting_s,
       list_sum(list_transform(c.turns, lambda t: t.generating_s)) AS generating_s,
       len(c.logprobs) AS tokens, c.finished_s - c.started_s AS seconds, c.rollout, c.attempt
FROM completions c LEFT JOIN rewards r USING (trajectory)
WHERE len(c.turns) > 0 OR c.reason_ LIKE 'agent: %'
"""

_TURNS = """
SELECT trajectory, "group", place AS turn, t.turn.finish AS finish, t.turn.fork AS fork,
       t.turn.generated - t.turn.start AS prompt_tokens,
       t.turn."end" - t.turn.generated AS tokens, t.turn.waiting_s AS waiting_s,
       t.turn.generating_s AS generating_s, t.turn.overridden AS overridden,
       t.turn.digest AS digest, coalesce(list_contains(t.abandoned, place - 1), FALSE) AS abandoned
FROM (
    SELECT trajectory, "group", unnest(turns) AS turn, generate_subscripts(turns, 1) AS place,
           abandoned
    FROM completions WHERE len(turns) > 0
) t
"""

VIEWS: dict[str, SqlView] = {
    view.name: view
    for view in (
        SqlView("trajectories", "the topic: every completion, also late and dead ones"),
        SqlView("annotations", "the topic: annotations (late rewards and others) of trajectories"),
        SqlView("ledger", "the topic: what was trained, in the trainer's order"),
        SqlView("admissions", "the topic: which groups were admitted, and when"),
        SqlView("applied", "the topic: which rollout served which version from when"),
        SqlView("settings", "settings of the run that other views use"),
        SqlView("evaluations", "one row per evaluation of held-out prompts (metrics/eval.jsonl)"),
        SqlView(
            "completions",
            "the first completion of each trajectory in its group's partition, which is the valid "
            "one; columns as in trajectories",
            ("trajectories",),
            _COMPLETIONS,
        ),
        SqlView(
            "scores",
            "the first annotation of each (trajectory, name), its first value (of a run with "
            "process_rewards their sum)",
            ("annotations", "settings"),
            _SCORES,
        ),
        SqlView(
            "rewards",
            "one row per trajectory: its reward, from its record or a scorer's annotation",
            ("completions", "scores"),
            _REWARDS,
        ),
        SqlView("takes", "one row per micro-batch that was trained", ("ledger",), _TAKES),
        SqlView(
            "trained",
            "one row per trained trajectory: in which step, update and micro-batch",
            ("ledger",),
            _TRAINED,
        ),
        SqlView(
            "steps",
            "one row per step (the latest term of a repeated one), with its metrics",
            ("ledger",),
            _STEPS,
        ),
        SqlView(
            "groups",
            "one row per admitted group: how it ended, when, and in which step",
            ("admissions", "ledger"),
            _GROUPS,
        ),
        SqlView(
            "spans",
            "one row per span of tokens under one version, with its lag in steps",
            ("completions", "trained", "settings"),
            _SPANS,
        ),
        SqlView(
            "lag", "trained tokens by step and by their lag at consumption", ("spans",), _LAG
        ),
        SqlView(
            "drafts",
            "one row per trajectory with drafts: pass over its prompt, draft tokens proposed and "
            "accepted, and the number of steps",
            ("completions",),
            _DRAFTS,
        ),
        SqlView(
            "episodes",
            "one row per episode of an agent: turns, branches, times, and why it failed",
            ("completions", "rewards"),
            _EPISODES,
        ),
        SqlView(
            "turns",
            "one row per turn of an episode: its tokens, times, and the cause if it branched",
            ("completions",),
            _TURNS,
        ),
        SqlView(
            "fates",
            "one row per admitted trajectory: trained, filtered, dropped, released, dead or open",
            ("admissions", "rewards", "trained", "spans", "groups"),
            FATES,
        ),
        SqlView(
            "bias",
            "quantiles of length and difficulty of admitted, finished and trained trajectories",
            ("fates",),
            BIAS,
        ),
        SqlView(
            "pass_at_k",
            "pass@k, unbiased, of each wave of training and of each evaluation",
            ("fates", "evaluations"),
            PASS_AT_K,
        ),
    )
}  # fmt: skip

_WORD = re.compile(r"[a-z_]+")
_TEXT = re.compile(r"\b(text_of|prompt_of|answer_of)\s*\(", re.IGNORECASE)
_READS_CATALOGUE = frozenset({"show", "describe", "information_schema", "duckdb_views", "pragma"})


def views_named_in(sql: str) -> frozenset[str]:
    """Returns those whose names occur in the query as words, or all of them if it reads DuckDB's
    catalogue. A superfluous one costs time but never changes a result.
    """
    words = set(_WORD.findall(sql.lower()))
    if words & _READS_CATALOGUE:
        return frozenset(VIEWS)
    return frozenset(words & VIEWS.keys())


def uses_text(sql: str) -> bool:
    """Whether it calls a function that decodes tokens, which imports a tokenizer."""
    return _TEXT.search(sql) is not None


def dependency_order(names: Iterable[str]) -> list[str]:
    """Returns the views with all that they need, each after those that it needs."""
    ordered: dict[str, None] = {}

    def add(name: str) -> None:
        for need in VIEWS[name].needs:
            add(need)
        ordered.setdefault(name)

    for name in sorted(names):
        add(name)
    return list(ordered)
