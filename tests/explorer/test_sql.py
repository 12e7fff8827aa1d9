"""Free SQL is off by default, and where it is on, reads the run and nothing else."""

import os
import resource
import threading
from urllib.parse import quote

import pytest

from rollstream.errors import CorruptObject
from rollstream.look.explorer.serving import sql, sql_process
from testbed.waiting import wait_for


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
        "SELECT * FROM locations",
        "SELECT * FROM paths",
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


@pytest.fixture
def bounded_memory():
    """Should a bound fail, the test ends by a failed allocation and not by a full machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("query", "limit"),
    [
        ("SELECT list(x) FROM range(100000000) r(x)", "192 MB"),
        ("SELECT list_sum(range(1000000000))", "1 GB"),
        pytest.param(
            "SELECT len(repeat('x', 300000000)) + len(range(200000000))", "1 GB",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "SELECT repeat('x', 200000000) FROM range(10)", "1 GB", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_a_query_that_needs_too_much_memory_is_refused(bounded_memory, living, query, limit):
    found = ask(living, query)
    assert found.status == 400
    assert f"the query needed more than {limit}: " in found.json()["error"]["message"]
    assert ask(living, "SELECT 1").json()["rows"] == [[1]]
    assert living.explorer._sql is not None
    allowed, _ = resource.prlimit(living.explorer._sql._process.pid, resource.RLIMIT_DATA)
    assert 0 < allowed <= sql.MEMORY + (os.cpu_count() or 1) * sql_process.STACK_BYTES


def test_a_file_that_is_unreadable_for_want_of_memory_is_not_called_damaged():
    damage = CorruptObject("archived file x is damaged")
    assert sql_process.refusal(damage).state == "unreadable"
    damage.__context__ = MemoryError()
    assert sql_process.refusal(damage).state == "memory"


def test_the_process_of_sql_is_kept_for_the_next_query(living):
    def process() -> sql.SqlProcess:
        ask(living, "SELECT 1")
        assert living.explorer._sql is not None
        return living.explorer._sql._process

    assert process() is process()


def test_a_close_ends_the_query_and_its_process(living):
    answers: list[int] = []
    ask(living, "SELECT 1")
    free_sql = living.explorer._sql
    assert free_sql is not None
    assert free_sql._process is not None
    child = free_sql._process._child
    endless = "SELECT count(*) FROM range(100000000000) a, range(1000) b"
    asking = threading.Thread(target=lambda: answers.append(ask(living, endless).status))
    asking.start()
    wait_for(lambda: free_sql._lock.locked())
    free_sql.close()
    asking.join(60)
    assert child.poll() is not None
    assert answers != [200]


def test_rows_and_bytes_are_bounded(living):
    found = ask(living, "SELECT x FROM range(5000) r(x)").json()
    assert (len(found["rows"]), found["cut"]) == (sql_process.ROWS_MAX, True)
    found = ask(living, "SELECT repeat('x', 500000) FROM range(100)").json()
    assert found["cut"]
    assert len(found["rows"]) <= 5
