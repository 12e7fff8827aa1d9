"""Fills a `RunIndex` from the run's reader (`IndexReader`), archive and log as one, and continues
at each call of `refresh`. Only light columns of archived files are read, never tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa

from rollstream.analysis.record_times import with_known_times
from rollstream.explorer.index import IndexProgress, RunIndex
from rollstream.storage.archive.log_view import LogView, TopicView
from rollstream.storage.archive.reading import release_memory
from rollstream.storage.archive.schema import arrow_schema
from rollstream.streams.records import Position
from rollstream.streams.topics import NUMBER_MAX, is_in_key_partition

ENVELOPE = (
    "partition",
    "offset",
    "timestamp",
    "key",
    "schema",
    "term",
    "sequence",
    "void",
    "reason",
)
# In the order in which topics are read.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "admissions": ("group", "wave", "trajectories", "deadline_s", "prompt", "role"),
    "ledger": (
        "step", "update", "micro_batch", "members", "groups", "group", "reason_", "detail",
        "micro_batches", "version", "state_hash", "weights_hash", "takes", "metrics", "counts",
        "time_s", "role",
    ),
    "annotations": ("trajectory", "group", "name", "values", "scorer", "reason_"),
    "trajectories": (
        "trajectory", "group", "index", "attempt", "task", "rollout", "rollout_term", "spans",
        "finish", "reward", "trainer_version", "started_s", "finished_s", "reason_", "moves",
        "wave", "drafts",
    ),
    "applied": (
        "rollout", "rollout_term", "version", "checked", "tensors", "seconds", "time_s",
    ),
}  # fmt: skip
# Rows are collected for one statement until there are so many, or until they take so much.
ROWS_MIN, BYTES_MIN = 32_768, 8 << 20

_VALID = "NOT void AND reason IS NULL AND schema = "
_SECONDS = "epoch_ms(timestamp) / 1000"
_ADMITTED = f"""
INSERT INTO admitted BY NAME SELECT "group", wave, {_SECONDS} AS admitted_s, deadline_s,
    trajectories AS names, prompt.partition AS prompt_p, prompt."offset" AS prompt_o
FROM batch b WHERE {_VALID}'admitted/1'
AND NOT EXISTS (SELECT 1 FROM admitted a WHERE a."group" BETWEEN $g_min AND $g_max
    AND a."group" = b."group")
"""
_TRAJECTORIES = f"""
INSERT INTO t BY NAME SELECT trajectory, "group", index, attempt, task, rollout, rollout_term,
    finish, reason_ AS reason, reward, spans[-1]."end" AS tokens,
    spans[1].version.number AS version, spans[-1].version.number AS version_last,
    list_min(list_transform(spans, lambda s: s.version.number)) AS version_oldest,
    trainer_version.number AS trainer_version, m.step AS step, started_s, finished_s, wave, moves,
    drafts.guessed AS guessed,
    list_sum(list_filter(drafts.runs, lambda run, place: place % 2 = 0)) AS accepted,
    coalesce(epoch_ms(timestamp) / 1000, finished_s) AS appended_s, partition AS p, "offset" AS o
FROM batch b LEFT JOIN (
    SELECT p, o, max(step) AS step FROM members WHERE p BETWEEN $p_min AND $p_max
    AND o BETWEEN $o_min AND $o_max GROUP BY ALL
) m ON m.p = b.partition AND m.o = b."offset"
WHERE {_VALID}'trajectory/1' AND NOT EXISTS (
    SELECT 1 FROM t WHERE t."group" BETWEEN $g_min AND $g_max AND t.trajectory = b.trajectory)
QUALIFY row_number() OVER (PARTITION BY trajectory ORDER BY partition, "offset") = 1
"""
_NOTED = f"""
INSERT INTO noted BY NAME SELECT trajectory, "group", name, values[1]::DOUBLE AS value,
    len(values) AS count, scorer, coalesce(reason_, '') AS reason, {_SECONDS} AS time_s,
    partition AS p, "offset" AS o
FROM batch b WHERE {_VALID}'annotation/1' AND (coalesce(reason_, '') != '' OR (len(values) > 0
    AND len(list_filter(values, lambda v: NOT abs(v) <= {NUMBER_MAX})) = 0))
AND NOT EXISTS (SELECT 1 FROM noted n WHERE n."group" BETWEEN $g_min AND $g_max
    AND n.trajectory = b.trajectory AND n.name = b.name)
QUALIFY row_number() OVER (PARTITION BY trajectory, name ORDER BY partition, "offset") = 1
"""
_REWARDED = """
UPDATE t SET reward = n.value FROM noted n
WHERE t."group" BETWEEN ? AND ? AND n."group" BETWEEN ? AND ? AND n.name = 'reward'
AND n.trajectory = t.trajectory AND n.value IS NOT NULL AND t.reward IS DISTINCT FROM n.value
"""
_LEDGER = (
    f"""
INSERT INTO takes BY NAME SELECT step, update, micro_batch, term, {_SECONDS} AS time_s,
    len(members) AS trajectories, list_transform(groups, lambda g: g."group") AS groups,
    partition AS p, "offset" AS o
FROM batch WHERE {_VALID}'take/1'
""",
    f"""
INSERT INTO members BY NAME SELECT step, update, micro_batch, m.at.partition AS p,
    m.at."offset" AS o
FROM (SELECT step, update, micro_batch, unnest(members) AS m FROM batch WHERE {_VALID}'take/1')
""",
    f"""
UPDATE t SET step = m.step FROM (
    SELECT step, m.at.partition AS p, m.at."offset" AS o
    FROM (SELECT step, unnest(members) AS m FROM batch WHERE {_VALID}'take/1')
) m WHERE t.p = m.p AND t.o = m.o AND t.o BETWEEN $o_min AND $o_max
""",
    f"""
INSERT INTO superseded BY NAME SELECT step, update, unnest(micro_batches) AS micro_batch
FROM batch WHERE {_VALID}'superseded/1'
""",
    f"""
INSERT INTO ends BY NAME
SELECT g."group" AS "group", 'trained' AS ended, '' AS detail, step, time_s, p, o FROM (
    SELECT unnest(groups) AS g, step, {_SECONDS} AS time_s, partition AS p, "offset" AS o
    FROM batch WHERE {_VALID}'take/1')
UNION ALL BY NAME
SELECT "group", reason_ AS ended, detail, step, {_SECONDS} AS time_s, partition AS p,
    "offset" AS o
FROM batch WHERE {_VALID}'group_closed/1'
""",
    f"""
INSERT INTO done BY NAME SELECT step, term, time_s, version.number AS version,
    version.term AS version_term, takes, metrics, counts, state_hash,
    coalesce(weights_hash, '') AS weights_hash, partition AS p, "offset" AS o
FROM batch WHERE {_VALID}'step_done/1'
""",
)
# A superseded take trained nothing (invariant 12): its members and groups are open again.
_SUPERSEDED = (
    """
UPDATE t SET step = NULL FROM members m JOIN superseded s USING (step, update, micro_batch)
WHERE t.p = m.p AND t.o = m.o
""",
    """
DELETE FROM members WHERE EXISTS (SELECT 1 FROM superseded s WHERE s.step = members.step
AND s.update = members.update AND s.micro_batch = members.micro_batch)
""",
    """
DELETE FROM ends WHERE ended = 'trained' AND NOT EXISTS (
    SELECT 1 FROM takes k WHERE k.p = ends.p AND k.o = ends.o AND NOT EXISTS (
        SELECT 1 FROM superseded s WHERE s.step = k.step AND s.update = k.update
        AND s.micro_batch = k.micro_batch))
""",
)
_SERVED = f"""
INSERT INTO served BY NAME SELECT time_s, rollout, rollout_term, version.number AS version,
    version.term AS version_term, seconds, checked, tensors
FROM batch WHERE {_VALID}'applied/1'
"""
_OPENED = f"""
INSERT INTO opened BY NAME SELECT {_SECONDS} AS time_s, role, term, $topic AS topic,
    partition AS p
FROM batch WHERE {_VALID}'opened/1'
"""


class IndexReader:
    """For one thread; `view` is that thread's own reader. Damaged archived files are left out, and
    their rows are in `holes`. `report` receives the progress after each batch; `stopped` is asked
    before each, so that a long read can be ended.
    """

    def __init__(
        self,
        view: LogView,
        index: RunIndex,
        report: Callable[[IndexProgress], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._view, self._index, self._report, self._stopped = view, index, report, stopped
        self._topics: dict[str, TopicView] = {}
        self._listed: dict[str, set[str]] = {}  # without a log: the archived files by topic
        self.holes: list[str] = []

    def refresh(self) -> bool:
        """Read new records; returns whether the index changed. Without a log, what was archived
        since the last listing is new.
        """
        before = self._index.changes
        if self._view.bus is None:
            self._list_archive()
        # The ledger's end is fixed before those of the other topics, so a member of a take is
        # either in the index or arrives in this call.
        ends = {topic: self._end(topic) for topic in ("ledger", *COLUMNS)}
        total = sum((ends["trajectories"] or self._archived()).values())
        self._progress(total=total)
        for topic in COLUMNS:
            for batch in self._batches(topic, ends[topic]):
                if self._stopped():
                    return False
                self._insert(topic, batch)
                # Else freed memory adds up over the first read.
                if batch.nbytes >= BYTES_MIN // 2:
                    release_memory()
        self._progress(total=total, complete=True)
        changed = self._index.changes != before
        if changed:
            release_memory()
        return changed

    def _list_archive(self) -> None:
        # The ledger is listed first: the members of its takes are then in the later listings.
        for topic in ("ledger", *COLUMNS):
            before = self._listed.get(topic)
            files = self._view.archived(topic, relist=before is not None)
            self._listed[topic] = {file.key for part in files.values() for file in part}
            opened = self._topics.get(topic)
            if opened is not None and self._listed[topic] != before:
                start = dict.fromkeys(range(self._view.partitions(topic)), 0) | opened.positions
                self._topics[topic] = self._opened(topic, start)

    def _opened(self, topic: str, start: Mapping[int, int | Position] | None = None) -> TopicView:
        names = (*ENVELOPE, *COLUMNS[topic])
        reader = self._view.topic(topic, start, columns=names, skip_damaged=True)
        reader.on_hole = lambda hole: self.holes.append(str(hole))
        return reader

    def _end(self, topic: str) -> Mapping[int, int] | None:
        if self._view.bus is None or not self._view.has(topic):
            return None
        return self._view.end(topic)

    def _archived(self) -> Mapping[int, int]:
        return self._view.end("trajectories") if self._view.has("trajectories") else {}

    def _batches(self, topic: str, ends: Mapping[int, int] | None) -> Iterator[pa.Table]:
        if topic not in self._topics:
            if not self._view.has(topic):
                return
            self._topics[topic] = self._opened(topic)
        collected: list[pa.Table] = []
        for table in self._topics[topic].tables(ends):
            collected.append(_light(table, topic))
            rows, size = sum(map(len, collected)), sum(table.nbytes for table in collected)
            if rows >= ROWS_MIN or size >= BYTES_MIN:
                yield pa.concat_tables(collected)
                collected = []
        if collected:
            yield pa.concat_tables(collected)

    def _insert(self, topic: str, batch: pa.Table) -> None:
        index = self._index
        # Ranges of groups and offsets let DuckDB skip what cannot concern the batch.
        groups = _range(batch, "group", "g") if topic != "applied" else None
        if topic == "ledger":
            self._insert_ledger(batch)
        elif topic == "applied":
            index.insert(_SERVED, batch)
        elif topic == "trajectories":
            self._insert_trajectories(batch, groups)
        elif groups is not None:
            index.insert(_NOTED if topic == "annotations" else _ADMITTED, batch, groups)
        if topic in ("admissions", "ledger"):
            index.insert(_OPENED, batch, {"topic": topic})
        elif groups is not None and topic in ("trajectories", "annotations"):
            index.execute(_REWARDED, [*groups.values()] * 2)

    def _insert_trajectories(self, batch: pa.Table, groups: dict[str, int] | None) -> None:
        batch = self._well_placed(batch)
        places = _range(batch, "partition", "p"), _range(batch, "offset", "o")
        if groups is not None and places[0] is not None and places[1] is not None:
            self._index.insert(_TRAJECTORIES, batch, groups | places[0] | places[1])
        read = sum(at.offset for at in self._topics["trajectories"].positions.values())
        self._progress(trajectories=read)

    def _insert_ledger(self, batch: pa.Table) -> None:
        index = self._index
        # A step is written to its members' rows in both orders of arrival.
        for statement in _LEDGER:
            if "$o_min" in statement:
                if index.value("SELECT count(*) FROM t"):
                    index.insert(statement, batch, _member_bounds(batch))
            else:
                index.insert(statement, batch)
        if "superseded/1" in batch.column("schema").to_pylist():
            for statement in _SUPERSEDED:
                index.execute(statement)

    def _well_placed(self, batch: pa.Table) -> pa.Table:
        # Trainer, dispatch and audit ignore rows outside the partition of their group.
        partitions = self._view.key_partitions("trajectories")
        if not partitions:
            return batch
        groups, places = batch.column("group").to_pylist(), batch.column("partition").to_pylist()
        pairs = set(zip(groups, places, strict=True))
        wrong = {
            (group, place)
            for group, place in pairs
            if group is not None and not is_in_key_partition(group, place, partitions)
        }
        if not wrong:
            return batch
        mask = [pair not in wrong for pair in zip(groups, places, strict=True)]
        rows: Any = batch
        return rows.filter(pa.array(mask))

    def _progress(self, **changed: Any) -> None:
        progress = self._index.progress
        changed["complete"] = progress.complete or changed.get("complete", False)
        self._index.progress = replace(progress, **changed)
        if self._index.progress != progress:
            self._report(self._index.progress)


def _light(table: pa.Table, topic: str) -> pa.Table:
    fields: list[Any] = [
        field.with_nullable(True)
        for field in cast("Any", arrow_schema(topic))
        if field.name in (*ENVELOPE, *COLUMNS[topic])
    ]
    # Files of an older release lack some columns.
    columns = [
        table.column(field.name)
        if field.name in table.schema.names
        else cast("Any", pa).nulls(len(table), field.type)
        for field in fields
    ]
    return with_known_times(pa.Table.from_arrays(columns, schema=pa.schema(fields)))


def _range(batch: pa.Table, column: str, letter: str) -> dict[str, int] | None:
    import pyarrow.compute as pc

    ends: Mapping[str, Any] = pc.min_max(batch.column(column)).as_py()
    if ends["min"] is None:
        return None
    return {f"{letter}_min": ends["min"], f"{letter}_max": ends["max"]}


def _member_bounds(batch: pa.Table) -> dict[str, Any]:
    import pyarrow.compute as pc

    members = batch.column("members").combine_chunks()
    offsets = members.flatten().field("at").field("offset") if len(members) else members
    ends = pc.min_max(offsets).as_py() if len(offsets) else {"min": None}
    if ends["min"] is None:
        # No offset is in this range.
        return {"o_min": 0, "o_max": -1}
    return {"o_min": ends["min"], "o_max": ends["max"]}
