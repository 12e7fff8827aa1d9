"""`rollstream audit`: its output, its exit codes, and invalid names of runs."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollstream.consumers.audit.audit import Audit
from rollstream.run.cli.main import main, parse
from rollstream.storage.stores.connect import open_store
from rollstream.streams.records import GroupClosed
from testbed.repository import ROOT
from testbed.servers import moto_s3
from testbed.violations.healthy_run import open_run


def audit_output(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["audit", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_a_healthy_run_has_a_tick_per_invariant(folder: Path, capsys) -> None:
    code, text = audit_output(capsys, folder)
    assert code == 0
    assert [line[:3] for line in text.splitlines() if line.startswith("✓")] == [
        "✓ –", *(f"✓ {number}" for number in range(1, 8)), "✓ 1",
    ]  # fmt: skip
    assert "9 admitted, 4 trained, 1 filtered, 1 expired, 1 dead, 2 open, 2 steps" in text
    assert text.endswith("everything was checked, nothing is violated\n")


def test_a_violation_is_a_cross_its_place_and_exit_code_1(folder: Path, capsys) -> None:
    run = open_run(folder, 2)
    run.record(GroupClosed(0, "dead", "", 3))
    run.bus.close()
    code, text = audit_output(capsys, folder)
    assert code == 1
    assert "✗ 1 every admitted group ends once" in text
    assert "✗ ledger 0:10: group 0: dead in step 3, but trained in step 1 already" in text
    code, text = audit_output(capsys, folder, "--json")
    (line,) = [one for one in json.loads(text)["invariants"] if one["state"] == "violated"]
    (offender,) = line["offenders"]
    assert (offender["topic"], offender["partition"], offender["offset"]) == ("ledger", 0, 10)


def test_unchecked_parts_are_reported_with_exit_code_2(capsys) -> None:
    code, text = audit_output(capsys, ROOT / "examples" / "archive")
    assert code == 2
    assert "not checked: the store holds no weights/" in text
    assert "? 6" in text
    assert "✓ 6" not in text


def test_an_archive_in_a_bucket_is_audited_by_its_url(capsys) -> None:
    local = open_store(f"file:{ROOT / 'examples' / 'archive' / 'store'}")
    url = moto_s3.new_url()
    remote = open_store(url)
    for entry in local.list("archive/"):
        remote.put(entry.key, local.get(entry.key))
    code, text = audit_output(capsys, url, "--json")
    report = json.loads(text)
    assert (code, report["run"], report["violations"]) == (2, "remainder", 0)
    assert report["invariants"][1]["counts"]["admitted"] == 164


def test_a_damaged_archive_file_is_named(tmp_path: Path, capsys) -> None:
    """Every hole is reported: records behind the damage are not checked."""
    place = Path(shutil.copytree(ROOT / "examples" / "archive", tmp_path / "archived"))
    (file,) = place.glob("store/archive/topic=ledger/*/*/*.parquet")
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-100])
    code, text = audit_output(capsys, place)
    assert code == 1
    assert "ledger-00000-00000000000000000000.parquet" in text
    assert "is damaged" in " ".join(text.split())


def test_rows_that_are_archived_twice_are_named(tmp_path: Path, capsys) -> None:
    place = Path(shutil.copytree(ROOT / "examples" / "archive", tmp_path / "archived"))
    (file,) = place.glob("store/archive/topic=ledger/*/*/*.parquet")
    shutil.copy(file, file.with_name("ledger-00000-00000000000000000005.parquet"))
    code, text = audit_output(capsys, place)
    assert code == 1
    assert "ledger/0: offset 5 is archived twice" in text


def test_a_missing_archive_file_is_a_hole(tmp_path: Path, capsys) -> None:
    place = Path(shutil.copytree(ROOT / "examples" / "archive", tmp_path / "archived"))
    (file,) = place.glob("store/archive/topic=trajectories/*/*/trajectories-00002-*.parquet")
    file.unlink()
    code, text = audit_output(capsys, place)
    assert code == 2
    assert "completions that takes name are missing" in text


def test_a_damaged_log_could_not_be_checked(folder: Path, capsys) -> None:
    for file in (folder / "bus").glob("ledger.db*"):
        file.unlink()
    (folder / "bus" / "ledger.db").write_bytes(b"rubbish" * 1000)
    assert main(["audit", str(folder)]) == 2
    assert "ledger.db" in capsys.readouterr().err


def test_a_run_that_was_only_prepared_is_no_violation(folder: Path, tmp_path: Path, capsys) -> None:
    """It creates nothing there, either."""
    place = tmp_path / "prepared"
    place.mkdir()
    shutil.copy(folder / "config.json", place)
    assert main(["audit", str(place)]) == 2
    assert "neither a log nor a store" in capsys.readouterr().err
    assert os.listdir(place) == ["config.json"]


def test_a_place_that_is_none_is_refused(tmp_path: Path, capsys) -> None:
    assert main(["audit", str(tmp_path / "nothing")]) == 2
    assert "no such run or archive" in capsys.readouterr().err


def test_the_examples_of_the_help_run(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copytree(folder, tmp_path / "runs" / "quickstart-0")
    with pytest.raises(SystemExit):
        parse(["audit", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    examples = [shlex.split(line)[1:] for line in lines if line.startswith("rollstream ")]
    assert len(examples) == 2
    for arguments in examples:
        assert main(arguments) == 0
        assert capsys.readouterr().out


def test_an_audit_imports_neither_torch_nor_duckdb(folder: Path) -> None:
    """It may run beside a trainer on a small machine."""
    code = (
        "import sys; from rollstream.run.cli.main import main; assert main(sys.argv[1:]) == 0; "
        "print(sorted({'torch', 'transformers', 'duckdb', 'pydantic'} & set(sys.modules)))"
    )
    line = [sys.executable, "-c", code, "audit", str(folder)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


COLUMNS = ("offset", "timestamp", "key", "schema", "void", "members")
ODD_VALUES = ("text", True, {"a": [1]}, 1 << 62)
QUICK = {("offset", 0), ("timestamp", 3)}
"""Columns with the number of an odd value: one that is damage, and one beyond its type."""


@pytest.mark.parametrize(
    ("column", "value"),
    [
        pytest.param(column, value, marks=() if (column, number) in QUICK else pytest.mark.slow)
        for column in COLUMNS
        for number, value in enumerate(ODD_VALUES)
    ],
    ids=str,
)
def test_odd_types_in_an_archive_are_unreadable_or_damage(
    tmp_path: Path, capsys, column: str, value: object
) -> None:
    """A file that lacks columns is a damaged one, which the report names; no type is a traceback,
    whose exit code would say that the run violates an invariant.
    """
    place = Path(shutil.copytree(ROOT / "examples" / "archive", tmp_path / "archived"))
    (path,) = place.glob("store/archive/topic=ledger/*/*/*.parquet")
    path.chmod(0o644)
    table = pq.ParquetFile(path).read()
    odd = pa.array([value] * len(table))
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, odd), path)
    code, text = audit_output(capsys, place)
    assert code == 2 or (code == 1 and "is damaged" in " ".join(text.split()))


def test_an_error_that_nobody_expects_is_no_violation(folder: Path, capsys, monkeypatch) -> None:
    def check(audit: Audit, *arguments: object) -> None:
        raise TypeError("a column of no known type")

    monkeypatch.setattr(Audit, "check", check)
    assert main(["audit", str(folder)]) == 2
    assert "could not be read to its end" in capsys.readouterr().err


def test_a_log_that_lost_what_a_checkpoint_has_read_is_a_violation(folder: Path, capsys) -> None:
    shutil.rmtree(folder / "bus")
    open_run(folder, 2).bus.close()  # an empty log in its place, as a role makes it
    code, text = audit_output(capsys, folder)
    assert code == 1
    assert "the log is another one, or was lost: ledger/0 ends at" in " ".join(text.split())
