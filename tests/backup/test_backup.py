"""A backup of a run that changes meanwhile, is interrupted, or is another one."""

import dataclasses
import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rollstream.errors import ConfigurationError
from rollstream.keep import backup as backup_module
from rollstream.keep.backup import (
    BACKUP_KEY,
    BEGUN_KEY,
    LOG,
    Backup,
    LogSegment,
    missing_ranges,
    parse_segment,
)
from rollstream.keep.restore import read_backup
from rollstream.run.cli.main import main
from rollstream.storage.claim_check import blob_key
from rollstream.storage.identity import (
    DELETED,
    IDENTITY_KEY,
    read_identity,
)
from rollstream.storage.leases import LeaseCandidate, acquire_lease
from rollstream.storage.stores.base import Data, content_hash
from rollstream.storage.terms import read_role
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import encode
from rollstream.streams.connect import open_bus
from rollstream.streams.fence import truncate
from rollstream.streams.records import Claim, Position
from rollstream.streams.topics import catalogue
from testbed.memory import MemoryStore
from tests.backup.copies import SAFE, Interrupted, backed_up, history, restored, store_of
from tests.support.killed_at import run_killed_at

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=5)


@given(RANGES, st.integers(0, 30), st.integers(0, 30))
def test_missing_ranges_are_what_no_segment_holds(
    spans: list[tuple[int, int]], begin: int, size: int
) -> None:
    present = [LogSegment("t", 0, first, first + count) for first, count in spans]
    held = {at for one in present for at in range(one.first, one.end)}
    found = [at for a, b in missing_ranges(begin, begin + size, present) for at in range(a, b)]
    assert found == [at for at in range(begin, begin + size) if at not in held]


def test_a_term_that_was_taken_while_the_log_was_copied_is_not_drawn_again(
    run: Path, tmp_path: Path
) -> None:
    taken: list[int] = []

    def act(part: str) -> None:
        if part == f"{LOG}ledger":
            lease = acquire_lease(store_of(run), LeaseCandidate("trainer", "t", "n", 0.0), 0.0)
            taken.append(lease.term)

    backed_up(run, to := MemoryStore(), progress=act)
    restored(to, tmp_path / "again")
    present = read_role(store_of(tmp_path / "again"), "trainer")
    assert present is not None
    assert (present[0].term, present[0].released) == (taken[0], True)


def test_a_run_that_truncates_meanwhile_is_copied_from_a_later_cut(
    run: Path, bus: Bus, tmp_path: Path
) -> None:
    ends = bus.end("trajectories")
    acted: list[str] = []

    def act(part: str) -> None:
        acted.append(part)
        if acted.count(f"{LOG}trajectories") == 1 and part.endswith("trajectories"):
            truncate(bus, "trajectories", {p: Position(end - 1) for p, end in ends.items()})

    backup = backed_up(run, to := MemoryStore(), progress=act)
    assert [part for part in acted if part.startswith("again")]
    begins = {one.topic.name: one.begins for one in backup.topics}
    assert begins["trajectories"] == tuple(end - 1 for _, end in sorted(ends.items()))
    restored(to, tmp_path / "again")
    assert history(tmp_path / "again") == history(run)


def test_a_version_that_retention_deletes_meanwhile_stays_out(run: Path, tmp_path: Path) -> None:
    store = store_of(run)
    oldest = sorted({e.key.split("/")[1] for e in store.list("weights/v")})[0]

    def act(part: str) -> None:
        for entry in list(store.list(f"weights/{oldest}/")):
            store.delete(entry.key)

    backup = backed_up(run, MemoryStore(), progress=act)
    assert not [one for one in backup.objects if f"weights/{oldest}/" in one.key]


def test_large_records_are_in_the_backup_and_a_claim_on_nothing_does_not_stop_it(
    run: Path, bus: Bus, tmp_path: Path
) -> None:
    found = content_hash(b"large")
    keys = [blob_key("annotations", "2026-01-01T00", one) for one in (found, content_hash(b"no"))]
    store_of(run).put(keys[0], b"large")
    store_of(run).put(blob_key("annotations", "2026-01-01T00", content_hash(b"unnamed")), b"u")
    claims = [encode(Claim(blob=key, bytes=5, hash=found), None) for key in keys]
    bus.append("annotations", [AppendEntry(b"k", claim, 0) for claim in claims])
    backed_up(run, to := MemoryStore())
    restored(to, tmp_path / "again")
    assert [one.key for one in store_of(tmp_path / "again").list("blobs/")] == keys[:1]


class FailingStore(MemoryStore):
    """Fails at the nth write, and counts writes by key."""

    left = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def put(self, key: str, data: Data) -> str:
        self.left -= 1
        if self.left < 0:
            raise Interrupted
        self.written.append(key)
        return super().put(key, data)


@pytest.mark.parametrize("after", range(0, 50, 7))
def test_a_backup_is_interrupted_anywhere_and_the_same_call_copies_the_rest(
    run: Path, tmp_path: Path, after: int
) -> None:
    to = FailingStore()
    to.left = after
    with pytest.raises(Interrupted):
        backed_up(run, to)
    with pytest.raises(ConfigurationError, match="is incomplete"):
        read_backup(to, "backup")
    to.left = 10**9
    backed_up(run, to)
    log = [key for key in to.written if key.startswith(LOG) and not _is_compacted(key)]
    assert len(set(log)) == len(log), "a segment was copied twice"
    restored(to, tmp_path / "again")
    assert history(tmp_path / "again") == history(run)


def _is_compacted(key: str) -> bool:
    segment = parse_segment(key)
    return segment is not None and segment.topic not in SAFE


@pytest.mark.parametrize(
    "nth",
    [
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(12, marks=pytest.mark.slow),
        pytest.param(40, marks=pytest.mark.long),
    ],
)
def test_a_backup_that_was_killed_is_completed_by_the_same_command(
    run: Path, tmp_path: Path, nth: int
) -> None:
    words = ["backup", str(run), str(tmp_path / "backup")]
    run_killed_at("rollstream.storage.stores.file:FileStore.put", nth, words)
    assert main(["restore", str(tmp_path / "backup"), str(tmp_path / "again")]) == 2
    assert not (tmp_path / "again").exists()
    assert main(words) == 0
    assert main(["restore", str(tmp_path / "backup"), str(tmp_path / "again")]) == 0
    assert history(tmp_path / "again") == history(run)


def test_large_topics_are_many_segments(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def segments(backup: Backup) -> int:
        return len([one for one in backup.objects if one.key.startswith(LOG)])

    few = segments(backed_up(run, MemoryStore()))
    monkeypatch.setattr(backup_module, "SEGMENT_BYTES", 1)
    monkeypatch.setattr("rollstream.streams.reader.RANGE_BYTES", 2000)
    backup = backed_up(run, to := MemoryStore())
    assert segments(backup) > few
    restored(to, tmp_path / "again")
    assert history(tmp_path / "again") == history(run)


def test_a_destination_is_of_one_backup(run: Path, tmp_path: Path) -> None:
    backed_up(run, to := MemoryStore())
    with pytest.raises(ConfigurationError, match="complete backup"):
        backed_up(run, to)
    to.delete(BACKUP_KEY)
    to.put(BEGUN_KEY, b"another")
    with pytest.raises(ConfigurationError, match="another run"):
        backed_up(run, to)
    with pytest.raises(ConfigurationError, match="not empty"):
        backed_up(run, store_of(run))


def test_a_run_that_was_restored_meanwhile_is_not_mixed_with_an_earlier_part(
    run: Path, bus: Bus
) -> None:
    """The restored run writes other records at the offsets that the interrupted backup holds."""
    bus.append("applied", [AppendEntry(b"k", b"one", 0)])
    backed_up(run, to := MemoryStore())
    to.delete(BACKUP_KEY)
    bus.close()
    for path in (run / "bus").glob("applied.db*"):
        path.unlink()
    with closing(open_bus(f"sqlite:{run}/bus")) as again:
        again.create([topic for topic in catalogue(2) if topic.name == "applied"])
        again.append("applied", [AppendEntry(b"k", b"other", 0)] * 100)
    with pytest.raises(ConfigurationError, match="other records than applied/0"):
        backed_up(run, to)


def test_a_deleted_run_is_not_backed_up(run: Path) -> None:
    store = store_of(run)
    identity = read_identity(store)
    assert identity is not None
    store.put(
        IDENTITY_KEY, json.dumps({**dataclasses.asdict(identity), "needs": [DELETED]}).encode()
    )
    with pytest.raises(ConfigurationError, match="was deleted"):
        backed_up(run, MemoryStore())
