"""A query keeps what its words and values say: its verb in an error, its letters under any locale,
and each digit of a decimal number.
"""

import json
import os
import subprocess
import sys

import pytest

from rollstream.run.cli.main import main
from tests.analysis.asked_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return str(make_run(tmp_path_factory.mktemp("words") / "run"))


@pytest.mark.parametrize("verb", ["INSTALL", "LOAD"])
def test_a_refused_statement_is_called_by_its_own_word(run, verb, capsys):
    assert main(["query", run, f"{verb} httpfs"]) == 2
    assert f"this is {verb}:" in capsys.readouterr().err


def test_decimals_keep_their_scale(run, capsys):
    sql = "SELECT 1.50::DECIMAL(5,2) AS price, 12345678901234567890.12::DECIMAL(38,2) AS large"
    for form in ("--csv", "--rows=1"):
        assert main(["query", run, sql, form]) == 0
        _head, row = capsys.readouterr().out.splitlines()
        assert row.replace("\t", ",") == "1.50,12345678901234567890.12"


def test_what_python_has_no_exact_type_for_is_printed_as_duckdb_writes_it(run, capsys):
    sql = (
        "SELECT INTERVAL 1 YEAR AS a, INTERVAL '90' SECOND AS b, 'infinity'::DATE AS c, "
        "'-infinity'::TIMESTAMP AS d, DATE '9999-12-31' AS e, "
        "99999999999999999999999999999999999999::DECIMAL(38,0) AS f, 1.50::DECIMAL(5,2) AS g"
    )
    assert main(["query", run, sql, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "a": "1 year", "b": "00:01:30", "c": "infinity", "d": "-infinity", "e": "9999-12-31",
        "f": "9" * 38, "g": 1.5,
    }  # fmt: skip


def test_letters_of_a_query_pass_an_ascii_locale(run):
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "rollstream", "query", run, "SELECT 'é€' AS word", "--json"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"word": "é€"}


def test_bytes_that_are_not_utf8_are_refused(run, capsys):
    assert main(["query", run, "SELECT '\udcff'"]) == 2
    assert "the query is not UTF-8" in capsys.readouterr().err
