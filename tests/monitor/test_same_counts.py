"""Every count that two commands print is the same count: `top`, report, summary and audit."""

import json

import pytest

from rollstream.look.report.summary import open_history
from rollstream.run.cli.main import main
from rollstream.streams.connect import open_bus
from rollstream.streams.records import GroupClosed, Record, Superseded
from rollstream.streams.writer import FencedWriter
from tests.support.synthetic_run import admitted, publish_run, take

ENDINGS = ("trained", "filtered", "expired", "dead")
WHY = "the learner failed 3 times on it"


@pytest.fixture
def run_of_all_endings(tmp_path):
    """One take is superseded: of its groups one is poisoned and closed, one poisoned and not closed
    yet, and one trained again.
    """
    folder = publish_run(tmp_path / "run", steps=3)
    bus = open_bus(f"sqlite:{folder.path / 'bus'}")
    admissions = FencedWriter(bus, "admissions", "dispatch", 2)
    ledger = FencedWriter(bus, "ledger", "trainer", 2)
    for writer in (admissions, ledger):
        writer.open()
    admissions.append([(str(group), admitted(group)) for group in range(20, 27)])
    records: list[Record] = [
        take(4, range(20, 23)),
        Superseded(4, 0, (0,), (20, 21), WHY),
        GroupClosed(20, "dead", f"poisoned: {WHY}", 4),
        GroupClosed(23, "expired", "deadline", 4),
        GroupClosed(24, "filtered", "equal rewards", 4),
        GroupClosed(25, "filtered", "equal rewards", 4),
    ]
    ledger.append([("run", record) for record in records])
    bus.close()
    return folder


def test_top_report_and_audit_count_the_same_groups(run_of_all_endings, capsys):
    def printed(*words: str) -> dict:
        main([words[0], str(run_of_all_endings.path), "--json", *words[1:]])
        return json.loads(capsys.readouterr().out)

    top, report, audit = printed("top", "--once"), printed("report"), printed("audit")
    expected = {"trained": 13, "filtered": 2, "expired": 1, "dead": 2, "open": 3}
    assert report["outcomes"] == {"admitted": 21, **expected}
    (groups,) = (one["counts"] for one in audit["invariants"] if one["invariant"] == 1)
    assert {name: groups[name] for name in report["outcomes"]} == report["outcomes"]
    assert {name: top["outcomes"]["groups"][name] for name in ENDINGS} == {
        name: expected[name] for name in ENDINGS
    }
    assert top["queue"]["open_groups"] == 3
    assert top["restarts"] == report["restarts"] == 3
    assert sum(open_history(run_of_all_endings).state.restarts().values()) == 3
