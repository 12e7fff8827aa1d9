"""Validates SQL (exactly one read-only query) and explains DuckDB's errors in terms of the
views.
"""
# duckdb ships few types
# pyright: reportUnknownMemberType=false

import re

import duckdb

from rollstream.analysis.views import VIEWS
from rollstream.errors import ConfigurationError

_EXPLAIN = re.compile(r"\s*explain(\s+analyze)?(\s*\([^)]*\))?", re.IGNORECASE)
_QUERIES = (duckdb.StatementType.SELECT, duckdb.StatementType.MULTI)  # a pivot is several
_PIVOT = re.compile(r"\b(un)?pivot\b", re.IGNORECASE)
_RESERVED = re.compile(r'(?<!")\b(group\b(?!\s+by)|offset|end)\b(?!")', re.IGNORECASE)
_OF_QUERIES = (duckdb.DataError, duckdb.ProgrammingError, duckdb.NotSupportedError)
_NO_TABLE = re.compile(r"Table with name (\w+) does not exist")


def single_query(sql: str) -> str:
    """Returns the one query in `sql` without its closing semicolon. Raises `ConfigurationError` for
    several statements and for statements that write.
    """
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise explain_error(error, sql) from None
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
            f"{kind.name}: a log is never changed by a query"
        )
    return sql.strip().rstrip(";")


def may_be_damage(error: duckdb.Error) -> bool:
    """True if damaged files may be the cause, rather than the query."""
    return isinstance(error, duckdb.InvalidInputException) or not isinstance(error, _OF_QUERIES)


def explain_error(error: duckdb.Error, sql: str) -> ConfigurationError:
    """Returns DuckDB's message with a hint."""
    text = str(error).strip()
    missing = _NO_TABLE.search(text)
    if missing:
        from difflib import get_close_matches  # imported only after an error

        close = get_close_matches(missing[1].lower(), VIEWS, n=1)
        nearest = f"; nearest known: {close[0]}" if close else ""
        return ConfigurationError(
            f"no view {missing[1]}{nearest}\nviews: {', '.join(VIEWS)} (rollstream query --tables)"
        )
    if isinstance(error, duckdb.ParserException) and _RESERVED.search(sql):
        text += (
            '\n"group", "offset" and "end" are SQL keywords: write these columns in double quotes'
        )
    elif isinstance(error, duckdb.BinderException):
        text += "\nviews and their columns: rollstream query --tables"
    return ConfigurationError(text)
