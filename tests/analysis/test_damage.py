"""A query names a damaged file and the option that skips it; skipping it prints a warning."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollstream.errors import CorruptObject
from rollstream.look.query.locate import locate_run
from rollstream.look.query.session import QuerySession
from rollstream.run.cli.main import main
from tests.analysis.asked_run import archive, open_log


@pytest.fixture(params=["archive", "whole"])
def damaged(request, folders, tmp_path):
    """A copy of a run, and a function that damages one of its files."""
    folder = tmp_path / "run"
    shutil.copytree(folders[request.param], folder)
    (file,) = folder.glob("store/archive/topic=trajectories/*/*/*-00001-*.parquet")
    return folder, file


def spoil_footer(file):
    file.write_bytes(file.read_bytes()[:-200])


def spoil_data(file):
    content = bytearray(file.read_bytes())
    content[4:2004] = b"\xff\x00" * 1000
    file.write_bytes(content)


def empty(file):
    file.write_bytes(b"")


def foreign(file):
    pq.write_table(pa.table({"x": [1]}), file)


READ_ALL = "SELECT bit_xor(hash(t)) FROM trajectories t"


@pytest.mark.parametrize("spoil", [spoil_footer, spoil_data, empty, foreign])
def test_a_damaged_file_is_named_with_what_to_do(damaged, spoil, capsys):
    folder, file = damaged
    spoil(file)
    assert main(["query", READ_ALL, "--run", str(folder)]) == 1
    output = capsys.readouterr().err
    assert str(file) in output
    assert "--skip-corrupt" in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("spoil", [spoil_footer, spoil_data, empty, foreign])
def test_the_others_answer_without_it_or_the_log_for_it(damaged, spoil):
    folder, file = damaged
    spoil(file)
    reported: list[str] = []
    with QuerySession(locate_run(str(folder)), reported.append, skip_corrupt=True) as session:
        answer = session.answer(
            "SELECT partition, count(*) FROM trajectories GROUP BY 1 ORDER BY 1"
        )
        counts = dict(row for rows in answer.batches for row in rows)
    assert str(file) in reported[0]
    assert counts == ({0: 1, 1: 8} if (folder / "bus").exists() else {0: 1})


def test_a_file_that_was_put_there_twice_is_refused(folders, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folders["archive"], folder)
    (file,) = folder.glob("store/archive/topic=ledger/*/*/*.parquet")
    shutil.copy(file, file.with_name("ledger-00000-00000000000000000002.parquet"))
    with (
        QuerySession(locate_run(str(folder)), print) as session,
        pytest.raises(CorruptObject, match="the same rows of ledger"),
    ):
        session.answer("FROM steps")


def test_rows_without_a_copy_are_reported_as_missing(folders, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folders["half"], folder)
    for file in folder.glob("store/archive/topic=trajectories/*/*/*.parquet"):
        file.unlink()
    bus = open_log(folder)
    bus.truncate("trajectories", bus.end("trajectories"))
    bus.close()
    reported: list[str] = []
    with QuerySession(locate_run(str(folder)), reported.append) as session:
        (rows,) = session.answer("SELECT count(*) FROM trajectories").batches
    assert rows == [(2,)]  # the last record of a partition always stays
    assert "neither the archive nor the log holds offsets partition 1: 0 to 6" in reported[0]


def test_rows_that_leave_the_log_for_the_archive_meanwhile_are_found_there(folders, tmp_path):
    """The interleaving: the archive is listed, then the archive role writes a file and the log is
    truncated up to it, then the log is read.
    """
    folder = tmp_path / "run"
    shutil.copytree(folders["half"], folder)
    reported: list[str] = []
    with QuerySession(locate_run(str(folder)), reported.append) as session:
        session.archive.held("ledger")
        archive(folder)
        bus = open_log(folder)
        for topic in ("ledger", "trajectories"):
            bus.truncate(topic, bus.end(topic))
        bus.close()
        (rows,) = session.answer(
            "SELECT count(*), count(DISTINCT trajectory) FROM completions"
        ).batches
        (steps,) = session.answer("SELECT count(*) FROM steps").batches
    assert (rows, steps, reported) == ([(7, 7)], [(2,)], [])
