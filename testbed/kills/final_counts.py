"""The counts of a finished run of real processes: `rollstream audit`, a recount that shares no code
with it, and the archive's rows by their positions.
"""

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from rollstream.run.config.config import load
from rollstream.run.config.run_folder import store_url
from rollstream.storage.archive.reading import archived_files
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from testbed.recount import places_of, recount
from testbed.run_driver import RunDriver


@dataclass
class Counted:
    """`lost` sums missing groups and audit's violations; a run is right where it and `twice` are 0.
    `void` counts records that a fence dropped.
    """

    trained: int
    expired: int
    dead: int
    lost: int
    twice: int
    void: int
    wrong: list[str] = field(default_factory=list[str])

    @property
    def is_clean(self) -> bool:
        return not self.lost and not self.twice


def counted(folder: Path, steps: int) -> Counted:
    """Counts over log, store and archive, wherever they are."""
    report = RunDriver(folder).audit()
    again = recount(places_of(str(folder)))
    groups, trajectories = again["groups"], again["trajectories"]
    of = {line["invariant"]: line["counts"] for line in report["invariants"]}
    configuration = load(folder / "config.json")
    rows = rows_twice(open_store(store_url(configuration, folder)))
    wrong = [offender["what"] for line in report["invariants"] for offender in line["offenders"]]
    lost = {
        "trajectories are not found": trajectories["not_found"],
        "groups were never admitted": groups["never_admitted"],
        "records are missing": again["gaps"],
        "violations": report["violations"],
        "groups trained by one count only": abs(of[1]["trained"] - groups["trained"]),
        "steps are missing": abs(steps - again["steps"]),
    }
    twice = {
        "trajectories trained twice": trajectories["trained_twice"],
        "groups ended twice": groups["ended_twice"],
        "not the first completion": trajectories["not_the_first"],
        "rows twice in the archive": rows,
    }
    wrong += [f"{count} {what}" for what, count in (lost | twice).items() if count]
    return Counted(
        groups["trained"],
        groups["expired"],
        groups["dead"],
        sum(lost.values()),
        sum(twice.values()),
        of[7].get("void", 0),
        wrong,
    )


def rows_twice(store: ObjectStore) -> int:
    """Records that the archive holds more than once."""
    found = Counter(_rows(store))
    return sum(found.values()) - len(found)


def _rows(store: ObjectStore) -> Iterator[tuple[str, int, int]]:
    for file in archived_files(store):
        table = pq.read_table(io.BytesIO(store.get(file.key)), columns=["offset"])
        for offset in table["offset"].to_pylist():
            yield file.topic, file.partition, offset
