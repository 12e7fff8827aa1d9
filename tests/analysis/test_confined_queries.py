"""`rollstream query` reads the run and nothing else, whatever its SQL and the run's files name."""

import shutil

import pytest

from rollstream.run.cli.main import main
from tests.analysis.asked_run import archive, make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    living = make_run(tmp_path_factory.mktemp("confined") / "living")
    archived = make_run(living.parent / "archived")
    archive(archived)
    shutil.rmtree(archived / "bus")
    return living, archived


@pytest.mark.parametrize("kind", [0, 1], ids=["living", "archived"])
def test_a_query_reads_the_views_of_log_and_archive(runs, kind, capsys):
    for sql in ("SELECT count(*) AS n FROM steps", "SELECT count(*) AS n FROM trajectories"):
        assert main(["query", str(runs[kind]), sql, "--json"]) == 0
        assert '"n": 0' not in capsys.readouterr().out


@pytest.mark.parametrize(
    "query",
    [
        "FROM read_text('{outside}')",
        "FROM read_csv('{outside}')",
        "FROM '{outside}'",
        "FROM glob('/*')",
        "FROM read_parquet('{run}/store/archive/../../../outside.csv')",
        "FROM read_csv('http://127.0.0.1:1/x.csv')",
        "FROM arguments",
        "FROM location",
    ],
)
def test_a_query_reads_no_other_file_no_network_and_no_variable(runs, query, capsys):
    outside = runs[1].parent / "outside.csv"
    outside.write_text("planted,secret\n1,2\n")
    sql = query.format(outside=outside, run=runs[1])
    assert main(["query", str(runs[1]), sql]) == 2
    assert "secret" not in capsys.readouterr().out
