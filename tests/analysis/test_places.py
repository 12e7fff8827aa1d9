"""The names by which a run is found, its files, and the cost of starting a query."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.look.query.archive_files import ArchiveCache
from rollstream.look.query.locate import locate_run
from rollstream.run.cli.main import main
from rollstream.storage.archive.file_names import ARCHIVE_PREFIX, parse_archive_key
from rollstream.storage.stores.connect import open_store
from testbed.memory import MemoryStore
from testbed.repository import ROOT
from testbed.servers import moto_s3

COUNT = "SELECT count(*) AS n FROM completions"


@pytest.mark.parametrize(
    "of",
    [
        lambda folder: folder,
        lambda folder: folder / "config.json",
        lambda folder: folder / "store",
        lambda folder: folder / "store" / "archive",
        lambda folder: f"file:{folder}/store",
    ],
)
def test_a_run_is_its_folder_its_configuration_or_its_archive(of, folders, capsys):
    assert main(["query", COUNT, "--run", str(of(folders["archive"])), "--json"]) == 0
    assert capsys.readouterr().out == '{"n": 7}\n'


def test_the_newest_run_is_asked_where_none_is_named(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["query", COUNT]) == 2
    assert "holds no run" in capsys.readouterr().err
    shutil.copytree(folders["archive"], tmp_path / "runs" / "one")
    assert main(["query", COUNT, "--json"]) == 0
    output = capsys.readouterr()
    assert output.out == '{"n": 7}\n'
    assert "using the newest run" in output.err


def test_an_archive_of_several_runs_wants_a_name(folders, tmp_path, capsys):
    store = tmp_path / "store"
    shutil.copytree(folders["archive"] / "store", store)
    for topic in (store / "archive").iterdir():
        for run in list(topic.iterdir()):
            shutil.copytree(run, topic / "run=other")
    assert main(["query", COUNT, "--run", str(store)]) == 2
    assert "2 runs (asked, other): name one with --name NAME" in capsys.readouterr().err
    assert main(["query", COUNT, "--run", str(store), "--name", "other", "--json"]) == 0
    assert capsys.readouterr().out == '{"n": 7}\n'


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_rubbish_is_no_run(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match="not a run's configuration"):
        locate_run(str(tmp_path))


def test_asking_makes_no_folder(folders, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(folders["live"] / "config.json", folder)
    assert main(["query", "FROM steps", "--run", str(folder)]) == 0
    assert os.listdir(folder) == ["config.json"]


def test_files_of_other_stores_are_fetched_once_and_evicted_in_turn(folders, tmp_path):
    local, remote, reported = open_store(f"file:{folders['archive']}/store"), MemoryStore(), []
    files = [
        f
        for e in local.list(ARCHIVE_PREFIX)
        if (f := parse_archive_key(e.key, e.bytes)) is not None
    ]
    for file in files:
        remote.put(file.key, local.get(file.key))
    size = sum(file.bytes for file in files)
    fetched = ArchiveCache(remote, "s3://bucket/run", reported.append, tmp_path, bytes_max=size)
    paths = fetched.paths(files)
    assert [Path(p).read_bytes() for p in paths] == [local.get(f.key) for f in files]
    assert fetched.paths(files) == paths
    assert len(reported) == 1
    other = ArchiveCache(remote, "s3://bucket/other", reported.append, tmp_path, bytes_max=size)
    assert all(Path(path).exists() for path in other.paths(files[:2]))
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= size
    small = ArchiveCache(remote, "s3://bucket/run", reported.append, tmp_path, bytes_max=size - 1)
    with pytest.raises(ConfigurationError, match="copy the archive to a folder"):
        small.paths(files)


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        (
            ["query", "SELECT count(*) FROM trajectories"],
            "torch transformers pydantic numpy pyarrow rich",
        ),
        (["query", "FROM rewards"], "torch transformers pydantic rich"),
        (["tail", "ledger"], "torch transformers pydantic"),
        (["inspect", "--last"], "torch transformers pydantic"),
    ],
)
def test_asking_imports_what_it_needs_and_no_more(command, absent, folders):
    run = str(folders["archive"])
    words = [*command, "--run", run] if command[0] == "query" else [*command[:2], run]
    code = (
        "import sys; from rollstream.run.cli.main import main; assert main(sys.argv[1:]) == 0; "
        f"print(sorted(set({absent.split()}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, rollstream; rollstream.open_run; "
        "print(sorted({'duckdb', 'pyarrow', 'numpy', 'torch', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_an_archive_in_a_bucket_is_asked_by_its_url(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = moto_s3.new_url()
    local, remote = open_store(f"file:{folders['archive']}/store"), open_store(url)
    for entry in local.list(ARCHIVE_PREFIX):
        remote.put(entry.key, local.get(entry.key))
    assert main(["query", COUNT, "--run", url, "--json"]) == 0
    output = capsys.readouterr()
    assert output.out == '{"n": 7}\n'
    assert "fetching 2 archived files" in output.err
    assert main(["query", COUNT, "--run", url, "--json"]) == 0
    assert capsys.readouterr().err == ""
