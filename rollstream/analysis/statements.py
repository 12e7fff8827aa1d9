"""What may be asked, and what is said when it went wrong: one query, read-only, in the words of the
views.
"""
# duckdb ships few types
# pyright: reportUnknownMemberType=false

import re

import duckdb

from rollstream.analysis.views import VIEWS
from streams.errors import ConfigurationError

_EXPLAIN = re.compile(r"\s*explain(\s+analyze)?(\s*\([^)]*\))?", re.IGNORECASE)
_QUERIES = (duckdb.StatementType.SELECT, duckdb.StatementType.MULTI)  # a pivot is several
_PIVOT = re.compile(r"\b(un)?pivot\b", re.IGNORECASE)
_RESERVED = re.compile(r'(?<!")\b(group\b(?!\s+by)|offset|end)\b(?!")', re.IGNORECASE)
_OF_QUERIES = (duckdb.DataError, duckdb.ProgrammingError, duckdb.NotSupportedError)
_NO_TABLE = re.compile(r"Table with name (\w+) does not exist")


def the_query(sql: str) -> str:
    """The one query in `sql` without a closing semicolon; `ConfigurationError` for anything else:
    nothing is written by asking.
    """
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise explained(error, sql) from None
    if len(statements) != 1:
        raise ConfigurationError(f"write one query, got {len(statements)}: {sql.strip()[:80]!r}")
    kind = statements[0].type
    inner = sql
    if kind == duckdb.StatementType.EXPLAIN:
        inner = _EXPLAIN.sub("", sql, count=1)
        kind = duckdb.extract_statements(inner)[0].type
    if kind not in _QUERIES or (kind == duckdb.StatementType.MULTI and not _PIVOT.search(inner)):
        raise ConfigurationError(
            f"only queries are run here (SELECT, FROM, PIVOT, DESCRIBE, EXPLAIN), and this is "
            f"{kind.name}: nothing in a log is changed by asking"
        )
    return sql.strip().rstrip(";")


def is_of_data(error: duckdb.Error) -> bool:
    """Whether it may be the files' fault and not the query's."""
    return isinstance(error, duckdb.InvalidInputException) or not isinstance(error, _OF_QUERIES)


def explained(error: duckdb.Error, sql: str) -> ConfigurationError:
    """DuckDB's message, and what would help."""
    text = str(error).strip()
    missing = _NO_TABLE.search(text)
    if missing:
        from difflib import get_close_matches  # only who errs waits for it

        close = get_close_matches(missing[1].lower(), VIEWS, n=1)
        nearest = f"; nearest known: {close[0]}" if close else ""
        return ConfigurationError(
            f"no view {missing[1]}{nearest}\nviews: {', '.join(VIEWS)} (rollstream query --tables)"
        )
    if isinstance(error, duckdb.ParserException) and _RESERVED.search(sql):
        text += '\n"group", "offset" and "end" are words of SQL: as columns write them in quotes'
    elif isinstance(error, duckdb.BinderException):
        text += "\nviews and their columns: rollstream query --tables"
    return ConfigurationError(text)
