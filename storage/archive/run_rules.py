"""The rules by which the records of a run count, each as a piece of DuckDB's SQL.

A `source` is a relation with a topic's archive columns: all of its rows, or a batch of new ones.
"""

from rollstream.streams.topics import NUMBER_MAX

ENDINGS = ("trained", "filtered", "expired", "dead")
"""A group has one of these ends, or is open."""


def valid(schema: str) -> str:
    """A record of this schema that counts: readable, and not void (invariant 7)."""
    return f"schema = '{schema}' AND reason IS NULL AND NOT void"


def first_admission(offset: str = '"offset"') -> str:
    """A group's first admission counts."""
    return f'row_number() OVER (PARTITION BY "group" ORDER BY {offset}) = 1'


def newest_step(offset: str = '"offset"') -> str:
    """Of a step that was repeated after a crash the newest record counts."""
    return f"row_number() OVER (PARTITION BY step ORDER BY term DESC, {offset} DESC) = 1"


def first_completions(source: str) -> str:
    """The places of the completions that count: of each trajectory the first in its partition,
    whatever its attempt (invariant 2). Rows outside the partition of their group are left out by
    the caller, as trainer, dispatch and audit do.
    """
    return f"""(
    SELECT partition, min("offset") AS "offset" FROM {source} WHERE {valid("trajectory/1")}
    GROUP BY partition, trajectory
)"""


def first_annotations(source: str, by_part: str) -> str:
    """The first annotation of each trajectory and name, in the order of its partition. One without
    values counts only with a reason, one with a number out of bounds never. Its value is the first,
    or the sum of all if the condition `by_part` holds (`trainer.process_rewards`); null with a
    reason.
    """
    return f"""(
    SELECT unnest(first) FROM (SELECT arg_min({{
        trajectory: trajectory, "group": "group", name: name, scorer: scorer, reason: why,
        value: CASE WHEN why != '' THEN NULL WHEN {by_part} THEN list_sum(values)::DOUBLE
            ELSE values[1]::DOUBLE END,
        count: len(values), timestamp: timestamp, partition: partition, "offset": "offset"
    }}, (partition, "offset")) AS first
    FROM (SELECT *, coalesce(reason_, '') AS why FROM {source})
    WHERE {valid("annotation/1")} AND (why != '' OR (len(values) > 0
        AND len(list_filter(values, lambda v: NOT abs(v) <= {NUMBER_MAX})) = 0))
    GROUP BY trajectory, name)
)"""


def superseded_takes(source: str) -> str:
    """The takes that trained nothing, because the learner could not compute them (invariant 12)."""
    return f"""(
    SELECT step, update, unnest(micro_batches) AS micro_batch FROM {source}
    WHERE {valid("superseded/1")}
)"""


def effective_takes(source: str) -> str:
    """The takes that trained: all but the superseded."""
    return f"""(
    SELECT * FROM {source} ANTI JOIN {superseded_takes(source)} USING (step, update, micro_batch)
    WHERE {valid("take/1")}
)"""


def members(takes: str) -> str:
    """The trajectories that takes name, each with its place in `trajectories` and its hash."""
    return f"""(
    SELECT m.trajectory AS trajectory, step, update, micro_batch, term, timestamp,
        m.at.partition AS partition, m.at."offset" AS "offset", m.hash AS hash
    FROM (SELECT step, update, micro_batch, term, timestamp, unnest(members) AS m FROM {takes})
)"""


def group_ends(source: str) -> str:
    """All ends of groups; `first_ends` tells which count. A take begins with its groups, and
    `members` are the offsets of all their completions at that time.
    """
    return f"""(
    SELECT g."group" AS "group", 'trained' AS ended, '' AS detail, step, timestamp, partition,
        "offset", list_transform(g.members, lambda m: m.at."offset") AS members
    FROM (SELECT unnest(groups) AS g, step, timestamp, partition, "offset" FROM {source}
        WHERE {valid("take/1")})
    UNION ALL
    SELECT "group", reason_, coalesce(detail, ''), step, timestamp, partition, "offset", NULL
    FROM {source} WHERE {valid("group_closed/1")}
)"""


def poisoned_groups(source: str) -> str:
    """The groups of superseded takes that a step gave up: its takes of them ended nothing."""
    return f"""(
    SELECT step, unnest(poisoned) AS "group" FROM {source} WHERE {valid("superseded/1")}
)"""


def first_ends(ends: str, poisoned: str, offset: str = '"offset"') -> str:
    """A group's first end in the ledger counts (invariant 1); a trained one not if it is
    poisoned.
    """
    return f"""(
    SELECT * FROM {ends} AS e WHERE ended != 'trained' OR NOT EXISTS (
        SELECT 1 FROM {poisoned} AS p WHERE p.step = e.step AND p."group" = e."group")
    QUALIFY row_number() OVER (PARTITION BY "group" ORDER BY {offset}) = 1
)"""


def lag(newest: str, version: str) -> str:
    """Steps between two versions; below 0, as after a fork, it counts as 0 (invariant 5)."""
    # `greatest` would make an unknown lag 0.
    return f"CASE WHEN {newest} < {version} THEN 0 ELSE {newest} - {version} END"


def lag_consumed(version: str) -> str:
    """The lag of a token of this version when its `step` trains it."""
    return lag("step - 1", version)


# Turns of an agent's episode that the program left behind are not trained: the ranges of generated
# tokens of the turns in `abandoned`.
_ABANDONED = """list_filter(list_transform(turns, lambda t, i: {
    'number': i - 1,
    'start': list_sum(list_transform(turns[:i], lambda u: u."end" - u.generated))
        - (t."end" - t.generated),
    'end': list_sum(list_transform(turns[:i], lambda u: u."end" - u.generated))
}), lambda r: list_contains(abandoned, r.number))"""
ABANDONED_RANGES = f"CASE WHEN len(abandoned) > 0 THEN {_ABANDONED} END"


def abandoned_tokens(span: str, ranges: str) -> str:
    """How many of a span's tokens are in the `ABANDONED_RANGES`."""
    return f"""coalesce(list_sum(list_transform({ranges}, lambda r: greatest(0,
        least({span}."end", r."end") - greatest({span}.start, r.start)))), 0)::BIGINT"""


WAITED_S = (
    "coalesce(waiting_s, 0) + coalesce(list_sum(list_transform(turns, lambda t: t.waiting_s)), 0)"
)
ACCEPTED = "list_sum(list_filter(drafts.runs, lambda run, place: place % 2 = 0))"
"""The draft tokens of a trajectory that were accepted: every second run."""
# The prompt is what precedes the first generated token.
PROMPT_HASH = "hash(list_slice(tokens, 1, list_position(sources, 1) - 1))"
