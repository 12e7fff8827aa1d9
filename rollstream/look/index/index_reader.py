"""Fills a `RunIndex` from archive and log as one, and continues at each call of `refresh`. Only
light columns of archived files are read, tokens only if asked for.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from rollstream.look.index.run_index import IndexProgress, RunIndex
from rollstream.look.index.tables import (
    COLUMNS,
    ENVELOPE,
    REWARDED,
    SUPERSEDED,
    TABLES,
    TOKENS,
    TRAINED,
    light_batch,
)
from rollstream.look.query.record_times import with_known_times
from rollstream.storage.archive.log_view import LogView, TopicView
from rollstream.storage.archive.reading import release_memory
from rollstream.storage.archive.segments import Hole
from rollstream.streams.records import Position
from rollstream.streams.topics import is_in_key_partition

# Rows are collected for one statement until there are so many, or until they take so much.
ROWS_MIN, BYTES_MIN = 32_768, 8 << 20


class IndexReader:
    """Fills an index for one thread; `view` is that thread's own reader. Damaged archived files are
    left out, and their rows are in `holes`. `report` receives the progress after each batch;
    `stopped` is asked before each. `with_tokens` reads prompts too, for their lengths and
    repetitions.
    """

    def __init__(
        self,
        view: LogView,
        index: RunIndex,
        report: Callable[[IndexProgress], None] = lambda progress: None,
        stopped: Callable[[], bool] = lambda: False,
        with_tokens: bool = False,
    ) -> None:
        self._view, self._index, self._report, self._stopped = view, index, report, stopped
        self._unread = () if with_tokens else TOKENS
        self._topics: dict[str, TopicView] = {}
        self._listed: dict[str, set[str]] = {}  # without a log: the archived files by topic
        self.holes: list[Hole] = []

    def refresh(self) -> bool:
        """Returns whether the index changed. Without a log, what was archived since the last
        listing is new.
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
        names = [n for n in (*ENVELOPE, *COLUMNS[topic]) if n not in self._unread]
        reader = self._view.topic(topic, start, columns=names, skip_damaged=True)
        reader.on_hole = self.holes.append
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
            collected.append(light_batch(topic, with_known_times(table), self._unread))
            rows, size = sum(map(len, collected)), sum(table.nbytes for table in collected)
            if rows >= ROWS_MIN or size >= BYTES_MIN:
                yield pa.concat_tables(collected)
                collected = []
        if collected:
            yield pa.concat_tables(collected)

    def _insert(self, topic: str, batch: pa.Table) -> None:
        index = self._index
        if topic == "trajectories":
            batch = self._well_placed(batch)
        letters = {"partition": "p", "offset": "o", "group": "g"}
        ranges: dict[str, int] = {}
        for column in letters.keys() & set(batch.column_names):
            ranges |= _bounds(batch.column(column), letters[column])
        for name, table in TABLES.items():
            if topic in table.topics:
                index.insert(table.insertion(name), batch, ranges)
        if topic == "ledger":
            if index.value("SELECT count(*) FROM t"):
                index.insert(TRAINED, batch, _member_range(batch))
            if index.value("SELECT count(*) FROM superseded"):
                for statement in SUPERSEDED:
                    index.execute(statement)
        elif topic in ("trajectories", "annotations"):
            index.insert(REWARDED, batch, ranges)
        if topic == "trajectories":
            read = sum(at.offset for at in self._topics["trajectories"].positions.values())
            self._progress(trajectories=read)

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


def _member_range(batch: pa.Table) -> dict[str, int]:
    members = batch.column("members").combine_chunks()
    return _bounds(members.flatten().field("at").field("offset") if len(members) else members, "m")


def _bounds(numbers: Any, letter: str) -> dict[str, int]:
    import pyarrow.compute as pc

    ends: Mapping[str, Any] = pc.min_max(numbers).as_py() if len(numbers) else {"min": None}
    # Nothing is in the range from 0 to -1.
    known = (0, -1) if ends["min"] is None else (ends["min"], ends["max"])
    return {f"{letter}_min": known[0], f"{letter}_max": known[1]}
