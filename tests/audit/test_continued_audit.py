"""An audit that continues from the last verdict reports what an audit of the whole log reports, and
uses no verdict that does not rest on this log.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from rollstream.consumers.audit import own_verdicts, verdict as verdicts
from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.verdict import VERDICT_KEY
from rollstream.run.cli.main import main
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


def newest_verdict() -> Path:
    return max(Path(os.environ["ROLLSTREAM_STATE"], "audits").iterdir(), key=_written)


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


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


def test_an_audit_writes_nothing_into_the_run(folder: Path, capsys) -> None:
    def files() -> dict[str, tuple[int, int]]:
        found = {str(path): path.stat() for path in folder.rglob("*") if path.suffix != ".db-shm"}
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}

    before = files()
    audited(folder, capsys)
    assert is_continued(audited(folder, capsys)[1])
    assert files() == before


def test_a_damaged_verdict_is_not_used(folder: Path, capsys) -> None:
    audited(folder, capsys)
    path = newest_verdict()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    code, found = audited(folder, capsys)
    assert code == 0
    assert not is_continued(found)
    assert is_continued(audited(folder, capsys)[1])


def test_a_verdict_that_came_with_the_run_is_not_read(folder: Path, capsys, monkeypatch) -> None:
    """The verdict decides what is not read again: one of another machine may state anything."""
    audited(folder, capsys)
    store_of(folder).put(VERDICT_KEY, newest_verdict().read_bytes())
    monkeypatch.setenv("ROLLSTREAM_STATE", str(folder.parent / "elsewhere"))
    code, found = audited(folder, capsys)
    assert (code, found["since_s"]) == (0, None)
    assert not is_continued(found)
    assert is_continued(audited(folder, capsys)[1])


def test_a_verdict_of_a_copy_of_the_run_is_not_believed(folder: Path, capsys) -> None:
    audited(folder, capsys)
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    assert not is_continued(audited(copy, capsys)[1])
    assert is_continued(audited(folder, capsys)[1])


def test_only_so_many_verdicts_are_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_STATE", str(tmp_path / "state"))
    for number in range(own_verdicts.VERDICTS_MAX + 3):
        assert own_verdicts.keep_own("run", str(number), b"x")
        os.utime(max((tmp_path / "state/audits").iterdir(), key=_written), (number, number))
    kept = [n for n in range(own_verdicts.VERDICTS_MAX + 3) if own_verdicts.read_own("run", str(n))]
    assert kept == list(range(3, own_verdicts.VERDICTS_MAX + 3))


def test_a_private_folder_that_cannot_be_written_fails_no_audit(
    folder: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROLLSTREAM_STATE", str(tmp_path / "file" / "state"))
    audited(folder, capsys)
    code, found = audited(folder, capsys)
    assert (code, is_continued(found)) == (0, False)
    assert any("ROLLSTREAM_STATE" in note for note in found["invariants"][0]["notes"])


def test_the_report_promises_what_was_checked_and_no_more(folder: Path, capsys) -> None:
    def last_line(*words: str) -> str:
        capsys.readouterr()
        assert main(["audit", str(folder), *words]) == 0
        text = capsys.readouterr().out
        return " ".join(text[text.rindex("\nn" if "\nn" in text else "\ne") :].split())

    assert last_line() == "everything was checked, nothing is violated"
    again = last_line()
    assert again.startswith("nothing is violated since the last audit at 20")
    assert again.endswith("of this machine; --whole reads what is older again")
    assert last_line("--whole") == "everything was checked, nothing is violated"


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
