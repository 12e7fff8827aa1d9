"""The tables of a `RunIndex`: each is a query over a `batch` of a topic's rows, by the rules of
`storage/archive/run_rules.py`. The views over them have a rule that needs all rows.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import pyarrow as pa

from rollstream.storage.archive import run_rules
from rollstream.storage.archive.schema import arrow_schema

ENVELOPE = (
    "partition", "offset", "timestamp", "key", "schema", "term", "sequence", "void", "reason",
)  # fmt: skip
# In the order in which topics are read.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "admissions": ("group", "wave", "trajectories", "deadline_s", "prompt", "role"),
    "ledger": (
        "step", "update", "micro_batch", "members", "groups", "group", "reason_", "detail",
        "micro_batches", "poisoned", "version", "state_hash", "weights_hash", "takes", "metrics",
        "counts", "time_s", "role",
    ),
    "annotations": ("trajectory", "group", "name", "values", "scorer", "reason_"),
    "trajectories": (
        "trajectory", "group", "index", "attempt", "task", "rollout", "rollout_term", "spans",
        "finish", "reward", "trainer_version", "started_s", "finished_s", "reason_", "moves",
        "wave", "drafts", "failures", "waiting_s", "turns", "abandoned", "tokens", "sources",
    ),
    "applied": (
        "rollout", "rollout_term", "version", "checked", "tensors", "seconds", "time_s",
    ),
}  # fmt: skip
# Not read unless the reader is asked to: they are most of a run.
TOKENS = ("tokens", "sources")


class IndexTable(NamedTuple):
    """`rows` is a query over `batch`, of these `topics`; a row whose `keys` the table has already
    is left out. `$g_min` to `$g_max` are the batch's groups, `p` its partitions and `o` its
    offsets, so that DuckDB skips what cannot concern it.
    """

    topics: tuple[str, ...]
    rows: str
    keys: tuple[str, ...] = ()

    def creation(self, name: str) -> str:
        return f"CREATE TABLE {name} AS {re.sub(r'[$][a-z]_[a-z]+', '0', self.rows)}"

    def insertion(self, name: str) -> str:
        statement = f"INSERT INTO {name} BY NAME FROM ({self.rows}) b"
        if not self.keys:
            return statement
        same = " AND ".join(f'x."{key}" = b."{key}"' for key in self.keys)
        within = 'x."group" BETWEEN $g_min AND $g_max'
        return f"{statement} WHERE NOT EXISTS (SELECT 1 FROM {name} x WHERE {within} AND {same})"


_TIME = "epoch_ms(timestamp) / 1000"
_PLACE = 'partition AS p, "offset" AS o'
_TAKES = f"(FROM batch WHERE {run_rules.valid('take/1')})"
MEMBERS = f"SELECT step, update, micro_batch, {_PLACE} FROM {run_rules.members(_TAKES)}"
TABLES: Mapping[str, IndexTable] = {
    "takes": IndexTable(("ledger",), f"""
SELECT step, update, micro_batch, term, {_TIME} AS time_s, len(members) AS trajectories,
    list_transform(groups, lambda g: g."group") AS groups, {_PLACE} FROM {_TAKES}"""),
    "members": IndexTable(("ledger",), MEMBERS),
    "superseded": IndexTable(("ledger",), f"FROM {run_rules.superseded_takes('batch')}"),
    "poisoned": IndexTable(("ledger",), f"FROM {run_rules.poisoned_groups('batch')}"),
    "ends": IndexTable(("ledger",), f"""
SELECT "group", ended, detail, step, members, {_TIME} AS time_s, {_PLACE}
FROM {run_rules.group_ends("batch")}"""),
    "done": IndexTable(("ledger",), f"""
SELECT step, term, time_s, version.number AS version, version.term AS version_term, takes, metrics,
    counts, state_hash, coalesce(weights_hash, '') AS weights_hash, {_PLACE}
FROM batch WHERE {run_rules.valid("step_done/1")}"""),
    "opened": IndexTable(("admissions", "ledger"), f"""
SELECT {_TIME} AS time_s, role, term, CASE role WHEN 'trainer' THEN 'ledger' ELSE 'admissions' END
    AS topic, partition AS p FROM batch WHERE {run_rules.valid("opened/1")}"""),
    "admitted": IndexTable(("admissions",), f"""
SELECT "group", wave, {_TIME} AS admitted_s, deadline_s, trajectories AS names,
    prompt.partition AS prompt_p, prompt."offset" AS prompt_o
FROM batch WHERE {run_rules.valid("admitted/1")} QUALIFY {run_rules.first_admission()}""",
        ("group",)),
    "served": IndexTable(("applied",), f"""
SELECT time_s, rollout, rollout_term, version.number AS version, version.term AS version_term,
    seconds, checked, tensors FROM batch WHERE {run_rules.valid("applied/1")}"""),
    "noted": IndexTable(("annotations",), f"""
SELECT trajectory, "group", name, value, count, scorer, reason, {_TIME} AS time_s, {_PLACE}
FROM {run_rules.first_annotations("batch", "(SELECT process_rewards FROM settings)")}""",
        ("trajectory", "name")),
    # Null are: `by_version`, the tokens of each span and those without abandoned turns (`kept`),
    # where all are of one version and kept; what is of the prompt, unless the reader reads tokens;
    # `waiting_s` of a trajectory that is no dialogue.
    "t": IndexTable(("trajectories",), f"""
SELECT * EXCLUDE (ranges, runs), CASE WHEN len(runs) > 1 OR ranges IS NOT NULL
    THEN list_transform(runs, lambda s: {{
        version: s.version.number, tokens: s."end" - s.start,
        kept: s."end" - s.start - {run_rules.abandoned_tokens("s", "ranges")}}}) END AS by_version
FROM (
    SELECT trajectory, "group", index, attempt, task, rollout, rollout_term, finish,
        reason_ AS reason, reward, coalesce(spans[-1]."end", 0) AS tokens,
        spans[1].version.number AS version, spans[-1].version.number AS version_last,
        list_min(list_transform(spans, lambda s: s.version.number)) AS version_oldest,
        spans AS runs, {run_rules.ABANDONED_RANGES} AS ranges,
        trainer_version.number AS trainer_version, m.step AS step, started_s, finished_s, wave,
        moves, drafts.guessed AS guessed, {run_rules.ACCEPTED} AS accepted,
        drafts.steps AS passes, drafts.asked AS asked, drafts.found AS found,
        drafts.lookup_s AS lookup_s, CASE WHEN len(failures) > 0 THEN failures END AS failures,
        CASE WHEN waiting_s IS NOT NULL OR len(turns) > 0 THEN {run_rules.WAITED_S} END
            AS waiting_s,
        len(abandoned) AS abandoned, len(tokens) - coalesce(spans[-1]."end", 0) AS prompt_tokens,
        CASE WHEN tokens IS NOT NULL THEN {run_rules.PROMPT_HASH} END AS prompt_hash,
        coalesce({_TIME}, finished_s) AS appended_s, {_PLACE}
    FROM batch SEMI JOIN {run_rules.first_completions("batch")} USING (partition, "offset")
    LEFT JOIN (
        SELECT p, o, max(step) AS step FROM members WHERE p BETWEEN $p_min AND $p_max
        AND o BETWEEN $o_min AND $o_max GROUP BY ALL
    ) m ON m.p = partition AND m.o = "offset"
)""", ("trajectory",)),
}  # fmt: skip
VIEWS = {
    "steps": f"SELECT * FROM done QUALIFY {run_rules.newest_step('o')}",
    "ended": f"FROM {run_rules.first_ends('ends', 'poisoned', 'o')}",
    # As the view `lag` of `rollstream query`.
    "lag": f"""
SELECT step, lag, sum(tokens)::BIGINT AS tokens, count(*) AS trajectories FROM (
    SELECT step, {run_rules.lag_consumed("version")} AS lag, tokens FROM t
    WHERE step IS NOT NULL AND by_version IS NULL AND version IS NOT NULL
    UNION ALL
    SELECT step, {run_rules.lag_consumed("span.version")} AS lag, sum(span.kept) AS tokens
    FROM (SELECT p, o, step, unnest(by_version) AS span FROM t WHERE step IS NOT NULL)
    GROUP BY p, o, step, lag
) WHERE (lag > (SELECT max_lag FROM settings)) IS NOT TRUE GROUP BY step, lag""",
}
# A step is written to its members' rows in both orders of arrival; the members of a superseded
# take are not trained.
TRAINED = f"""
UPDATE t SET step = m.step FROM ({MEMBERS}) m
WHERE t.p = m.p AND t.o = m.o AND t.o BETWEEN $m_min AND $m_max
"""
SUPERSEDED = (
    """
UPDATE t SET step = NULL FROM members m JOIN superseded s USING (step, update, micro_batch)
WHERE t.p = m.p AND t.o = m.o AND t.step = m.step
""",
    """
DELETE FROM members WHERE EXISTS (SELECT 1 FROM superseded s WHERE s.step = members.step
AND s.update = members.update AND s.micro_batch = members.micro_batch)
""",
)
REWARDED = """
UPDATE t SET reward = n.value FROM noted n
WHERE t."group" BETWEEN $g_min AND $g_max AND n."group" BETWEEN $g_min AND $g_max
AND n.name = 'reward' AND n.trajectory = t.trajectory AND n.value IS NOT NULL
AND t.reward IS DISTINCT FROM n.value
"""


def light_batch(topic: str, table: pa.Table | None, unread: tuple[str, ...] = TOKENS) -> pa.Table:
    """Returns rows with the columns of the index, none without a table. Columns that are `unread`,
    or that files of an older release lack, are null.
    """
    fields: list[Any] = [
        field.with_nullable(True)
        for field in cast("Any", arrow_schema(topic))
        if field.name in (*ENVELOPE, *COLUMNS[topic])
    ]
    schema = pa.schema(fields)
    if table is None:
        return cast("Any", schema).empty_table()
    columns = [
        table.column(field.name)
        if field.name in table.schema.names and field.name not in unread
        else cast("Any", pa).nulls(len(table), field.type)
        for field in fields
    ]
    return pa.Table.from_arrays(columns, schema=schema)
