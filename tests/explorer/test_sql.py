"""Free SQL is off by default, and where it is on, reads the run and nothing else."""

from urllib.parse import quote

import pytest

from rollstream.explorer import sql


def ask(server, query: str):
    return server.get(f"/api/r/0/sql?q={quote(query)}")


def test_sql_is_off_by_default(asked):
    assert ask(asked, "SELECT 1").status == 404
    assert asked.get("/api/views").status == 404
    assert asked.json("runs")["sql"] is False


def test_sql_reads_the_views(living):
    found = ask(living, "SELECT step FROM steps ORDER BY step").json()
    assert (found["names"], found["rows"]) == (["step"], [[1], [2]])
    assert "steps" in {view["name"] for view in living.json("views")["views"]}


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/*')",
        "COPY steps TO '/tmp/x.csv'",
        "ATTACH '/tmp/x.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET memory_limit = '100GB'",
        "PRAGMA memory_limit='100GB'",
        "CREATE TABLE x AS SELECT 1",
        "SELECT 1; SELECT 2",
        "SELECT * FROM read_parquet('http://example.com/x.parquet')",
        "SELECT getenv('HOME')",
    ],
)
def test_sql_reaches_no_file_no_network_and_no_setting(living, query):
    found = ask(living, query)
    assert found.status == 400, (query, found.body[:300])


def test_a_query_that_takes_too_long_is_ended(living, monkeypatch):
    monkeypatch.setattr(sql, "QUERY_S", 0.3)
    found = ask(living, "SELECT count(*) FROM range(100000000000) a, range(1000) b")
    assert found.status == 400
    assert ask(living, "SELECT 1").json()["rows"] == [[1]]


def test_a_query_that_needs_too_much_memory_is_refused(living):
    found = ask(living, "SELECT list(x) FROM range(100000000) r(x)")
    assert found.status == 400


def test_rows_and_bytes_are_bounded(living):
    found = ask(living, "SELECT x FROM range(5000) r(x)").json()
    assert (len(found["rows"]), found["cut"]) == (sql.ROWS_MAX, True)
    found = ask(living, "SELECT repeat('x', 500000) FROM range(100)").json()
    assert found["cut"]
    assert len(found["rows"]) <= 5
