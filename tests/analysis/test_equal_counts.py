"""Every count that two commands print is the same count: on a run with void, undecodable, dead and
misplaced records, archived in part, and truncated.
"""

import json
from pathlib import Path

import pytest

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.look.report.summary import read_history, summarise
from rollstream.run.cli.main import main
from rollstream.run.config.run_folder import run_folder
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import encode
from rollstream.streams.fence import position_before, truncate
from rollstream.streams.topics import partition_of
from rollstream.streams.values import Address
from tests.analysis.asked_run import RUN, archive, make_run, open_log, trajectory

TOPICS = ("trajectories", "annotations", "ledger", "admissions")


def asked(folder: Path, sql: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, int]]:
    capsys.readouterr()
    assert main(["query", sql, "--run", str(folder), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, int]]:
    """The counts of tail, query, audit, report, top and `LogView`, after checking that they
    agree.
    """
    bus, store = open_log(folder), open_store(f"file:{folder / 'store'}")
    try:
        view = LogView(bus, store, RUN)
        found: dict[str, dict[str, int]] = {}
        for topic in TOPICS:
            reader = view.topic(topic)
            records = list(reader.records())
            valid = "reason IS NULL AND NOT void AND schema <> 'opened/1'"
            (row,) = asked(folder, f"SELECT count(*) AS n FROM {topic} WHERE {valid}", capsys)
            assert len(records) == reader.counts["records"], topic
            assert row["n"] == len(records) + reader.counts["misplaced"], topic
            (row,) = asked(folder, f"SELECT count(*) AS n FROM {topic}", capsys)
            assert main(["tail", topic, str(folder), "--from", "begin", "--json"]) == 0
            assert len(capsys.readouterr().out.splitlines()) == row["n"], topic
            assert row["n"] == reader.counts.total(), topic
            assert not reader.holes, topic
            found[topic] = dict(reader.counts)
        results = {r.number: r for r in Audit(bus, store, RUN, AuditPolicy(known=False)).check()}
    finally:
        bus.close()
    endings = asked(
        folder, "SELECT ended AS ending, count(*) AS n FROM groups GROUP BY ALL", capsys
    )
    groups = {str(row["ending"]): row["n"] for row in endings}
    audited = {name: results[1].counts[name] for name in groups}
    assert audited == groups
    assert results[1].counts["admitted"] == sum(groups.values())
    (row,) = asked(folder, "SELECT count(*) AS n FROM completions", capsys)
    assert row["n"] == results[2].counts["completed"]
    (row,) = asked(folder, "SELECT count(*) AS n FROM trained", capsys)
    assert row["n"] == results[2].counts["trained"]
    report = summarise(read_history(LogView(open_log(folder), store, RUN), run_folder(folder)))
    assert {name: report.outcomes[name] for name in groups} == groups
    assert report.outcomes["admitted"] == sum(groups.values())
    capsys.readouterr()
    assert main(["top", str(folder), "--once", "--json"]) == 0
    top = json.loads(capsys.readouterr().out)
    assert top["restarts"] == report.restarts
    if not top["outcomes"]["is_tail"]:  # otherwise it states that the first groups are missing
        shown = {**top["outcomes"]["groups"], "open": top["queue"]["open_groups"]}
        assert {name: count for name, count in shown.items() if count} == groups
    return found | {"groups": groups}


def add_misplaced(bus: Bus) -> None:
    """A completion of the open group outside of its partition: everyone passes over it."""
    elsewhere = 1 - partition_of(b"3", 2)
    data = encode(trajectory(3, 1, ((0, 9, 1),), 1.0))
    bus.append("trajectories", [AppendEntry(b"3", data, elsewhere)])


def test_the_counts_agree_before_and_after_archive_and_truncation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    bus = make_run(folder) and open_log(folder)
    add_misplaced(bus)
    at_first = counted(folder, capsys)
    assert at_first["trajectories"]["misplaced"] == 1
    archive(folder)
    assert counted(folder, capsys) == at_first
    ledger = bus.end("ledger")[0]
    truncate(bus, "ledger", {0: position_before(bus, "ledger", Address(0, ledger - 2))})
    for partition, end in bus.end("trajectories").items():
        if end > 1:
            before = position_before(bus, "trajectories", Address(partition, end - 1))
            truncate(bus, "trajectories", {partition: before})
    bus.close()
    assert counted(folder, capsys) == at_first
