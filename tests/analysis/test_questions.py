"""Valid queries, and the errors of invalid ones."""

import json

import pytest

from rollstream.errors import ConfigurationError
from rollstream.run.cli.main import main


@pytest.fixture
def complaint(folders, capsys):
    """Returns the error of `rollstream query`, after checking that it exits with 2."""

    def of(sql: str, state: str = "archive") -> str:
        assert main(["query", sql, "--run", str(folders[state])]) == 2
        return capsys.readouterr().err

    return of


def test_an_unknown_view_names_the_nearest_and_all(complaint):
    output = complaint("SELECT * FROM trajectorys")
    assert "no view trajectorys; nearest known: trajectories" in output
    assert "ledger" in output


def test_an_unknown_column_names_candidates(complaint):
    output = complaint("SELECT reword FROM rewards")
    assert 'Referenced column "reword" not found' in output
    assert '"reward"' in output
    assert "--tables" in output


def test_a_keyword_of_sql_as_a_column_is_explained(complaint):
    assert "SQL keywords: write these columns in double quotes" in complaint(
        "SELECT group FROM groups"
    )


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 1) TO '{file}'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{file}'",
        "CREATE TABLE x (i INT)",
        "DROP VIEW steps",
        "ATTACH '{file}'",
        "INSTALL httpfs",
        "SET threads = 1",
        "PRAGMA database_list",
    ],
)
def test_only_queries_are_run(sql, complaint, tmp_path):
    file = tmp_path / "written"
    assert "only queries are run here" in complaint(sql.format(file=file))
    assert not file.exists()


@pytest.mark.parametrize("sql", ["", "-- nothing", "SELECT 1; SELECT 2"])
def test_one_query_is_asked_at_a_time(sql, complaint):
    assert "write one query" in complaint(sql)


def test_a_failing_query_fails_with_its_reason(complaint):
    assert "Could not convert string 'trained'" in complaint("SELECT ended::INT FROM groups")


@pytest.mark.parametrize(
    "sql",
    [
        "WITH s AS (FROM steps) SELECT count(*) AS n FROM s",
        "PIVOT groups ON ended USING count(*)",
        "DESCRIBE steps",
        "SUMMARIZE rewards",
        "EXPLAIN SELECT * FROM lag",
        "SHOW TABLES",
        "SELECT view_name FROM duckdb_views() WHERE NOT internal",
        "SELECT 1; -- the end",
    ],
)
def test_every_kind_of_query_is_answered(sql, folders, capsys):
    assert main(["query", sql, "--run", str(folders["half"])]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_an_answer_is_a_table_json_lines_or_csv(folders, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    run = ["--run", str(folders["live"])]
    sql = "SELECT step, metrics, [1, 2] AS list, NULL AS n, 1/0 AS inf FROM steps LIMIT 1"
    with monkeypatch.context() as terminal:
        terminal.setattr("sys.stdout.isatty", lambda: True)
        main(["query", sql, *run])
    table = capsys.readouterr().out.splitlines()
    assert table[0].split(" │ ")[0] == "step"
    assert table[-1] == "columns that do not fit: list, n, inf"
    main(["query", sql, *run])
    assert capsys.readouterr().out.splitlines()[1].endswith("\t[1, 2]\t\tinf")
    main(["query", sql, *run, "--json"])
    assert capsys.readouterr().out == (
        '{"step": 1, "metrics": {"reward_mean": 0.5, "accuracy": 0.5, "of_term": 1.0}, '
        '"list": [1, 2], "n": null, "inf": "Infinity"}\n'
    )
    main(["query", "SELECT step, [1, 2] AS list, NULL AS n FROM steps", *run, "--csv"])
    assert capsys.readouterr().out == 'step,list,n\n1,"[1, 2]",\n2,"[1, 2]",\n'


def test_a_long_result_is_cut_and_marked_on_a_terminal_alone(folders, capsys, monkeypatch):
    main(["query", "FROM range(100)", "--run", str(folders["live"])])
    assert len(capsys.readouterr().out.splitlines()) == 101
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    main(["query", "FROM range(100)", "--run", str(folders["live"]), "--rows", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "    0",
        "    1",
        "    2",
        "the first 3 rows; --rows N, --csv or --json print more",
    ]


def test_the_list_of_views_has_their_columns(folders, capsys):
    assert main(["query", "--tables", "--run", str(folders["archive"])]) == 0
    output = capsys.readouterr().out
    assert "groups: one row per admitted group" in output
    assert "ended VARCHAR" in " ".join(output.split())


def test_nothing_asked_is_refused(folders, capsys):
    assert main(["query", str(folders["half"])]) == 2
    assert "--tables" in capsys.readouterr().err


def test_errors_are_of_the_projects_tree(asked):
    with pytest.raises(ConfigurationError):
        asked("SELECT")


def test_columns_of_one_name_all_stay(folders, capsys):
    run = ["--run", str(folders["live"])]
    sql = 'SELECT 1 AS a, 2 AS a, 3 AS a_1, 4 AS "b\\u001b", 5 AS "b\x1b"'
    main(["query", sql, *run, "--json"])
    row = json.loads(capsys.readouterr().out)
    assert list(row.values()) == [1, 2, 3, 4, 5]
    main(["query", sql, *run, "--csv"])
    names = capsys.readouterr().out.splitlines()[0].split(",")
    assert names == ["a", "a_2", "a_1", "b\\u001b", "b\\u001b_1"]


def test_null_nan_and_infinity_differ_in_every_form(folders, capsys, monkeypatch):
    run = ["--run", str(folders["live"])]
    sql = "SELECT NULL AS n, 'nan'::FLOAT AS x, '-inf'::DOUBLE AS y, ['inf'::DOUBLE] AS z"
    main(["query", sql, *run])
    assert capsys.readouterr().out.splitlines()[1] == '\tnan\t-inf\t["Infinity"]'
    main(["query", sql, *run, "--csv"])
    assert capsys.readouterr().out.splitlines()[1] == ',nan,-inf,"[""Infinity""]"'
    main(["query", sql, *run, "--json"])
    row = json.loads(capsys.readouterr().out)
    assert list(row.values()) == [None, "NaN", "-Infinity", ["Infinity"]]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    main(["query", sql, *run])
    cells = capsys.readouterr().out.splitlines()[2].split("│")
    assert list(map(str.strip, cells)) == ["-", "nan", "-inf", "[inf]"]
