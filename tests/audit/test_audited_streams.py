"""Audit checks the versions of every weight stream, each by its own pointer and announcements."""

from contextlib import closing
from pathlib import Path

from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.manifest import manifest_key, read_manifest
from rollstream.storage.weights.named_streams import WeightStream
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.connect import open_bus
from rollstream.streams.values import Version
from testbed.versions import publish_small, small_tensors
from testbed.violations.healthy_run import RUN, audited

DRAFT = WeightStream("draft")


def published(folder: Path) -> ObjectStore:
    """Numbers skip, and a fenced writer left a version; returns the stream's part."""
    store = open_store(f"file:{folder / 'store'}")
    with closing(open_bus(f"sqlite:{folder / 'bus'}")) as bus:
        publish_small(bus, store, RUN, DRAFT, [0, 5])
        publish_small(bus, store, RUN, DRAFT, [9, 10])
    part = DRAFT.part(store)
    stray = NewVersion(RUN, Version(9, 1), small_tensors(9), {}, 1000, 1.0)
    lost = publish_version(part, stray).files[0]
    part.delete(f"weights/{Version(9, 1)}/{lost.name}")
    return part


def places(folder: Path) -> list[str]:
    return [f"{offender.key}: {offender.what}" for offender in audited(folder)[6].offenders]


def test_a_healthy_stream_violates_nothing(folder: Path) -> None:
    published(folder)
    result = audited(folder)[6]
    assert result.violations == 0
    assert result.counts["named streams"] == 1
    assert result.counts["versions kept"] == 3 + 4


def test_a_damaged_file_is_named_with_its_stream(folder: Path) -> None:
    part = published(folder)
    version = Version(10, 2)
    key = f"weights/{version}/{read_manifest(part, version).files[0].name}"
    part.put(key, b"damaged")
    assert [place.partition(": ")[0] for place in places(folder)] == [f"streams/draft/{key}"]


def test_another_manifest_than_the_announced_one_is_a_violation(folder: Path) -> None:
    part = published(folder)
    key = manifest_key(Version(5, 1))  # its announcement is the newest of its term
    part.put(key, part.get(key).replace(b'"created_s": ', b'"created_s": 1'))
    assert any("the log names manifest" in place for place in places(folder))


def test_a_lost_pointer_is_a_violation(folder: Path) -> None:
    part = published(folder)
    part.delete("weights/latest.json")
    assert places(folder) == ["streams/draft/weights/latest.json: versions exist, but no pointer"]
