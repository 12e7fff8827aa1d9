"""A log that is truncated while the audit reads it: truncated records are read from the archive,
once.
"""

from pathlib import Path

import pytest

from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.audit.folds import InvariantResult
from rollstream.consumers.audit.source import AuditSource
from rollstream.consumers.settings import ArchiveSettings
from rollstream.storage.archive import log_view
from rollstream.streams.fence import position_before, truncate
from rollstream.streams.values import Address
from testbed.violations.healthy_run import RUN, open_run


def test_what_was_read_before_is_no_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(tmp_path, 1)
    archive = TopicArchive(run.bus, run.store, RUN, "admissions", ArchiveSettings())
    archive.start()
    for group in range(6):  # one file each, after the opening
        run.admit(group)
        archive.finish()
    monkeypatch.setattr(log_view, "READ_RECORDS", 1)
    source = AuditSource(
        run.bus, run.store, RUN, InvariantResult(0, "the records that were read are complete")
    )
    source.fix_end("admissions")
    reading = source.messages("admissions")
    begun = [next(reading) for _ in range(4)]
    truncate(run.bus, "admissions", {0: position_before(run.bus, "admissions", Address(0, 6))})
    found = [*begun, *reading]
    run.bus.close()
    assert [offender.what for offender in source.result.offenders] == []
    assert [message.offset for message in found] == list(range(7))  # pyright: ignore[reportAttributeAccessIssue]
