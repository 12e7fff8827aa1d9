"""An audit that continues from the last verdict reports what an audit of the whole log reports, and
uses no verdict that does not rest on this log.
"""

import json
import shutil
from pathlib import Path

import pytest

from rollstream.cli.main import main
from rollstream.consumers.audit import verdict as verdicts
from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.verdict import VERDICT_KEY, read_verdict
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus
from rollstream.streams.records import GroupClosed
from testbed.stepped.findings import continued_results, differing
from testbed.stepped.trials import seeded
from testbed.violations.healthy_run import POLICY, RUN, complete_group, open_run

EARLIER = "were judged by an earlier audit"


def store_of(folder: Path) -> ObjectStore:
    return open_store(f"file:{folder / 'store'}")


def audited(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["audit", str(folder), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def counts(report: dict) -> list[dict]:
    """Without the notes, and without where the records were read."""
    return [
        {
            "invariant": one["invariant"],
            "violations": one["violations"],
            "counts": {k: n for k, n in one["counts"].items() if n and "from the" not in k},
        }
        for one in report["invariants"]
    ]


def is_continued(report: dict) -> bool:
    return any(EARLIER in note for note in report["invariants"][0]["notes"])


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_a_continued_audit_reports_what_a_whole_one_reports(folder: Path, share: float) -> None:
    bus, store = open_bus(f"sqlite:{folder / 'bus'}"), store_of(folder)
    whole = Audit(bus, store, RUN, POLICY).check()
    continued = continued_results(bus, store, POLICY, share, RUN)
    bus.close()
    assert differing(whole, continued) == []


@pytest.mark.parametrize("seed", range(8))
def test_audits_of_killed_runs_continue_to_the_same_report(seed: int) -> None:
    """`findings` compares audits continued at two times of the run with the whole one."""
    assert seeded(seed).found.wrong == []


def test_the_second_audit_continues_and_counts_the_same(folder: Path, capsys) -> None:
    first = audited(folder, capsys)
    assert not is_continued(first[1])
    second = audited(folder, capsys)
    assert is_continued(second[1])
    assert counts(second[1]) == counts(first[1])
    whole = audited(folder, capsys, "--whole")
    assert not is_continued(whole[1])
    assert counts(whole[1]) == counts(first[1])
    assert first[0] == second[0] == whole[0] == 0


def test_what_happens_after_a_verdict_is_judged_with_what_was_before(folder: Path, capsys) -> None:
    """Group 0 was trained before the verdict, 5 was open."""
    audited(folder, capsys)
    run = open_run(folder, 2)
    run.record(GroupClosed(0, "dead", "", 3), GroupClosed(5, "dead", "", 3))
    run.bus.close()
    code, found = audited(folder, capsys)
    assert is_continued(found)
    assert code == 1
    whole = audited(folder, capsys, "--whole")[1]
    assert counts(found) == counts(whole)
    offences = {one["what"] for of in found["invariants"] for one in of["offenders"]}
    assert offences == {one["what"] for of in whole["invariants"] for one in of["offenders"]}
    assert "group 0: dead in step 3, but trained in step 1 already" in offences


def test_a_violation_that_cannot_be_seen_any_more_stays(folder: Path, capsys) -> None:
    store = store_of(folder)
    key = next(entry.key for entry in store.list("weights/v00000002") if "config" in entry.key)
    data = store.get(key)
    store.delete(key)
    assert audited(folder, capsys)[0] == 1
    store.put(key, data)
    for _ in range(2):
        code, found = audited(folder, capsys)
        assert code == 1
        assert [one["key"] for of in found["invariants"] for one in of["offenders"]] == [key]
    code, found = audited(folder, capsys, "--whole")
    assert code == 0
    assert any("an earlier audit found" in note for note in found["invariants"][0]["notes"])
    code, found = audited(folder, capsys)
    assert code == 0
    assert any("an earlier audit found" in note for note in found["invariants"][0]["notes"])


def test_a_verdict_of_other_rules_or_another_release_is_not_used(
    folder: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited(folder, capsys)
    with monkeypatch.context() as patched:
        patched.setattr(verdicts, "RELEASE", "9.9.9")
        assert not is_continued(audited(folder, capsys)[1])
    assert not is_continued(audited(folder, capsys)[1])
    with monkeypatch.context() as patched:
        patched.setattr(verdicts, "_rules_hash", lambda: "other")
        assert not is_continued(audited(folder, capsys)[1])
    assert not is_continued(audited(folder, capsys)[1])
    assert is_continued(audited(folder, capsys)[1])


def test_a_verdict_of_another_log_is_not_used(folder: Path, tmp_path: Path, capsys) -> None:
    """The log went back to a copy and took another way, with as many records or fewer."""
    shutil.copytree(folder / "bus", tmp_path / "before")
    run = open_run(folder, 2)
    run.record(GroupClosed(5, "dead", "one way", 3))
    run.bus.close()
    audited(folder, capsys)
    for detail in ("other way", None):
        shutil.rmtree(folder / "bus")
        shutil.copytree(tmp_path / "before", folder / "bus")
        if detail:
            run = open_run(folder, 2)
            run.record(GroupClosed(5, "dead", detail, 3))
            run.bus.close()
        found = audited(folder, capsys)[1]
        assert not is_continued(found)
        assert counts(found) == counts(audited(folder, capsys, "--whole")[1])


def test_without_a_right_to_write_the_audit_works_and_states_it(folder: Path, capsys) -> None:
    store = folder / "store"
    (store / "audit").write_bytes(b"a file where the folder of the verdict would be")
    code, found = audited(folder, capsys)
    assert code == 0
    notes = found["invariants"][0]["notes"]
    assert any("the next audit cannot continue" in note for note in notes)


def test_a_damaged_verdict_is_not_used(folder: Path, capsys) -> None:
    audited(folder, capsys)
    store = store_of(folder)
    data = store.get(VERDICT_KEY)
    store.put(VERDICT_KEY, data[:-1] + bytes([data[-1] ^ 1]))
    code, found = audited(folder, capsys)
    assert code == 0
    assert not is_continued(found)
    assert read_verdict(store) is not None
    assert is_continued(audited(folder, capsys)[1])


def test_a_copy_of_an_archive_is_left_as_it_is(folder: Path, capsys) -> None:
    shutil.rmtree(folder / "bus")
    audited(folder, capsys)
    assert list(store_of(folder).list("audit/")) == []


def test_groups_that_were_open_are_judged_when_they_end(folder: Path, capsys) -> None:
    """Group 6 had no completion at the time of the verdict."""
    audited(folder, capsys)
    run = open_run(folder, 2)
    complete_group(run, 6, 2)
    run.bus.close()
    found = audited(folder, capsys)[1]
    assert is_continued(found)
    assert counts(found) == counts(audited(folder, capsys, "--whole")[1])
