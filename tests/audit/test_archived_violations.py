"""Audit reports the same of a log and of its archive: rows are read in batches, and every violation
is found, counted and worded as in the log.
"""

import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.folds import InvariantResult
from rollstream.consumers.settings import ArchiveSettings
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus
from testbed.violations.healthy_run import KEEP, POLICY, RUN, audited, completion, open_run
from testbed.violations.planted import PLANTED, Plant
from tests.support.shares import one_of

TOPICS = ("admissions", "ledger", "trajectories", "annotations")
NOT_ARCHIVED = {"loses_a_record", "acts_without_opening", "removes_a_row"}
"""The archive stops at a gap and reports it."""
POLICIES = (POLICY, KEEP)


def archive(folder: Path, *, truncate: bool = True) -> None:
    """Everything is archived, and the log keeps the last record of each partition, or all."""
    bus, stop = open_bus(f"sqlite:{folder / 'bus'}"), threading.Event()
    stop.set()
    ArchiveService(bus, open_store(f"file:{folder / 'store'}"), RUN, ArchiveSettings()).run(stop)
    for topic in TOPICS if truncate else ():
        ends = bus.end(topic).items()
        bus.truncate(topic, {partition: max(0, end - 1) for partition, end in ends})
    bus.close()


def whole_audit(folder: Path) -> list[InvariantResult]:
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    results = Audit(bus, open_store(f"file:{folder / 'store'}"), RUN, POLICY).check(is_whole=True)
    bus.close()
    return results


def found(results: dict[int, InvariantResult]) -> list[object]:
    return [
        (t.number, dict(t.counts), t.violations, t.offenders, t.unchecked, t.notes)
        for number, t in results.items()
        if number
    ]


@pytest.mark.parametrize(
    "plant",
    one_of(3, [p for p, _, _ in PLANTED if p.__name__ not in NOT_ARCHIVED]),
    ids=lambda p: p.__name__,
)
def test_a_violation_is_found_in_the_archive_as_in_the_log(folder: Path, plant: Plant) -> None:
    run = open_run(folder, 2)
    plant(run)
    run.bus.close()
    logged = [found(audited(folder, policy)) for policy in POLICIES]
    archive(folder)
    archived = [found(audited(folder, policy)) for policy in POLICIES]
    assert archived == logged


def test_archived_trajectories_are_read_as_rows_and_odd_ones_as_records(folder: Path) -> None:
    """Text that JSON escapes in rare ways, dead trajectories, second completions: the same
    counts.
    """
    run = open_run(folder, 2)
    run.complete(completion(6, 0, 2, reason='\x01 " \\ \n ü \u2028', finish="dead"))
    run.complete(completion(6, 1, 2, environment='{"turn": 1}', scores={"a": 0.1, 'b"': 1e-9}))
    run.complete(completion(6, 1, 2, reward=None, temperature=float("1.0"), attempt=2))
    run.complete(completion(99, 0, 2))  # of a group that was never admitted
    run.complete(completion(99, 1, 1, 2))
    run.bus.close()
    logged = found(audited(folder))
    archive(folder)
    assert found(audited(folder)) == logged


def test_a_changed_row_is_found_and_the_rows_before_it_count(folder: Path) -> None:
    whole = audited(folder)[3].counts["trajectories"]
    archive(folder)
    (path,) = sorted((folder / "store/archive/topic=trajectories").rglob("*-00000-*.parquet"))
    table, metadata = pq.read_table(path, partitioning=None), pq.read_metadata(path).metadata
    rewards = table.column("reward").to_pylist()
    rewards[3] = 7.0
    index = table.schema.get_field_index("reward")
    changed = table.set_column(index, table.schema.field(index), pa.array(rewards, pa.float64()))
    path.chmod(0o644)
    pq.write_table(changed.replace_schema_metadata(metadata), path)
    results = Audit(None, open_store(f"file:{folder / 'store'}"), RUN, POLICIES[0]).check()
    (offender,) = results[0].offenders
    assert "row 0:3 differs from its hash" in offender.what
    assert results[3].counts["trajectories"] == whole - (len(rewards) - 3)


def test_a_row_missing_within_a_file_is_found(folder: Path) -> None:
    archive(folder)
    (path,) = sorted((folder / "store/archive/topic=trajectories").rglob("*-00000-*.parquet"))
    table = pq.read_table(path, partitioning=None)
    path.chmod(0o644)
    pq.write_table(pa.concat_tables([table.slice(0, 2), table.slice(3)]), path)
    results = Audit(None, open_store(f"file:{folder / 'store'}"), RUN, POLICIES[0]).check()
    assert results[0].offenders[0].what == "offsets 2 to 2 are missing"


@pytest.mark.parametrize("truncate", [False, True])
def test_a_whole_audit_names_every_damaged_file_once(folder: Path, truncate: bool) -> None:
    """Also those whose records the log still has: they can still be put back, or archived again."""
    archive(folder, truncate=truncate)
    store = folder / "store"
    paths = [sorted((store / "archive" / f"topic={t}").rglob("*.parquet"))[0] for t in TOPICS]
    for path in paths:
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-100])
    results = whole_audit(folder)
    named = [offender.key for offender in results[0].offenders]
    assert sorted(named) == sorted(str(path.relative_to(store)) for path in paths)
    assert results[0].violations == len(paths)


def test_what_log_and_archive_both_have_is_verified_in_a_whole_audit(folder: Path) -> None:
    archive(folder, truncate=False)
    (path,) = sorted((folder / "store/archive/topic=trajectories").rglob("*-00000-*.parquet"))
    results = whole_audit(folder)
    assert results[0].counts["also archived"] >= pq.read_metadata(path).num_rows
    assert not results[0].violations
    path.chmod(0o644)
    path.write_bytes(b"rubbish")
    assert not audited(folder)[0].violations, "the log has the records"
