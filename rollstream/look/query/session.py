"""Answers SQL queries about one run with an in-memory DuckDB, which sees one state of each topic
and refuses statements that write.
"""

import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb

from rollstream.errors import ConfigurationError
from rollstream.look.query.duckdb_calls import distinct_columns, interruptibly
from rollstream.look.query.locate import RunLocation
from rollstream.look.query.looking import model_file, open_run_view
from rollstream.look.query.views import VIEWS, dependency_order, uses_text, views_named_in
from rollstream.storage.model_folder.hf_tokenizer import numbered_tokens
from rollstream.streams.topics import ARCHIVED_TOPICS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from rollstream.look.query.archive_files import ArchivedFiles
    from rollstream.look.query.base_views import TopicViews
    from rollstream.storage.archive.log_view import LogView


# Patterns are compiled on first use: most queries need none.
_EXPLAIN = r"(?i)\s*explain(\s+analyze)?(\s*\([^)]*\))?"
_QUERIES = (duckdb.StatementType.SELECT, duckdb.StatementType.MULTI)  # DuckDB calls a pivot MULTI
_PIVOT = r"(?i)\b(un)?pivot\b"
# Names of columns that are also SQL keywords, where they stand without quotes.
_RESERVED = r'(?i)(?<!")\b(group\b(?!\s+by)|offset|end)\b(?!")'
# Errors of a wrong query; others may come from damaged files.
_OF_QUERIES = (duckdb.DataError, duckdb.ProgrammingError, duckdb.NotSupportedError)
_NO_TABLE = r"Table with name (\w+) does not exist"


def single_query(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    """Returns the single query without its semicolon. Raises `ConfigurationError` for wrong SQL,
    several statements, or a statement that is no query.
    """
    sql = _utf8(sql)
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise explain_error(error, sql) from None
    if len(statements) != 1:
        raise ConfigurationError(f"write one query, got {len(statements)}: {sql.strip()[:80]!r}")
    kind = statements[0].type
    inner = sql
    if kind == duckdb.StatementType.EXPLAIN:
        inner = re.sub(_EXPLAIN, "", sql, count=1)
        kind = connection.extract_statements(inner)[0].type
    if kind not in _QUERIES or (
        kind == duckdb.StatementType.MULTI and not re.search(_PIVOT, inner)
    ):
        raise ConfigurationError(
            f"only queries are run here (SELECT, FROM, PIVOT, DESCRIBE, EXPLAIN), and this is "
            f"{_verb(inner, kind.name)}: a log is never changed by a query"
        )
    return sql.strip().rstrip(";")


def _utf8(sql: str) -> str:
    try:
        sql.encode()
    except UnicodeEncodeError:
        try:
            # Under an ASCII locale Python passes the bytes of an argument as surrogates.
            return os.fsencode(sql).decode()
        except UnicodeError:
            raise ConfigurationError(f"the query is not UTF-8: {sql.strip()[:80]!r}") from None
    return sql


def _verb(sql: str, kind: str) -> str:
    # DuckDB has one kind for several words, such as INSTALL and LOAD.
    word = re.match(r"\s*([a-zA-Z]+)", sql)
    return word[1].upper() if word else kind


def explain_error(error: duckdb.Error, sql: str) -> ConfigurationError:
    """Returns DuckDB's message, with a hint where one exists."""
    text = str(error).strip()
    missing = re.search(_NO_TABLE, text)
    if missing:
        from difflib import get_close_matches  # imported only after an error

        close = get_close_matches(missing[1].lower(), VIEWS, n=1)
        nearest = f"; nearest known: {close[0]}" if close else ""
        return ConfigurationError(
            f"no view {missing[1]}{nearest}\nviews: {', '.join(VIEWS)} (rollstream query --tables)"
        )
    if isinstance(error, duckdb.ParserException) and re.search(_RESERVED, sql):
        text += (
            '\n"group", "offset" and "end" are SQL keywords: write these columns in double quotes'
        )
    elif isinstance(error, duckdb.BinderException):
        text += "\nviews and their columns: rollstream query --tables"
    return ConfigurationError(text)


OPTIONS = {"autoinstall_known_extensions": "false"}  # a query makes no network request
BATCH_ROWS = 2048  # rows per batch of a result
# Types without an exact form in Python, and the DuckDB type that is read in their place: a time
# with a zone needs pytz, an optional library; a month has no number of days; dates may be infinite.
_READ_AS = {"TIMESTAMP WITH TIME ZONE": "TIMESTAMP", "INTERVAL": "VARCHAR", "DATE": "VARCHAR"}
Converted = TypeVar("Converted")


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Distinct names of the columns, their DuckDB types (`kinds`), and the rows in `batches`, an
    iterator that can be read once. Times are UTC.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    batches: Iterator[list[tuple[Any, ...]]]


class QuerySession:
    """About the run at `location`, for one thread. `warn` receives messages for the user, e.g.
    about missing rows. With `skip_corrupt` damaged files of the archive are left out.
    """

    def __init__(
        self, location: RunLocation, warn: Callable[[str], None], skip_corrupt: bool = False
    ) -> None:
        self.location = location
        self.warn = warn
        spill = f"{os.environ.get('TMPDIR', '/tmp')}/rollstream-query-{os.getpid()}"
        self.connection = duckdb.connect(":memory:", config={**OPTIONS, "temp_directory": spill})
        self.connection.execute("SET GLOBAL TimeZone = 'UTC'")
        self.skip_corrupt = skip_corrupt
        self._defined: set[str] = set()
        self._view: LogView | None = None
        self._cursor: duckdb.DuckDBPyConnection | None = None
        self._opened = ExitStack()

    def answer(self, sql: str) -> QueryResult:
        """Returns the rows as Python values, in batches. Raises `ConfigurationError` for a wrong
        query and `CorruptObject` for a damaged file, both here or while the batches are read.
        """
        with self._explained(sql):
            text = single_query(self.connection, sql)
            cursor = self._run(text, self._execute)
            names = distinct_columns([column[0] for column in cursor.description or ()])
            kinds = tuple(str(column[1]) for column in cursor.description or ())
            if not _READ_AS.keys().isdisjoint(kinds):
                interruptibly(cursor, partial(cursor.execute, _in_exact_types(text, kinds)))
        return QueryResult(names, kinds, self._batches(cursor, sql))

    def arrow(self, sql: str, take: Callable[[duckdb.DuckDBPyRelation], Converted]) -> Converted:
        """`take(relation)` for the query as a DuckDB relation. Raises the errors of `answer`."""
        with self._explained(sql):
            text = single_query(self.connection, sql)
            query = self.connection.cursor()
            return self._run(text, lambda sql: interruptibly(query, lambda: take(query.sql(sql))))

    def columns(self, view: str) -> dict[str, str]:
        self.define([view])
        relation = self.connection.sql(f"FROM {view}")
        return dict(zip(relation.columns, map(str, relation.types), strict=True))

    def check(self) -> None:
        """Reads all archived files of the topics used so far; a damaged one raises `CorruptObject`,
        or is left out with `skip_corrupt`.
        """
        for topic in self._topics():
            self.archive.check(topic)

    def define(self, names: Iterable[str]) -> None:
        """And the views that they read, unless they are defined."""
        for name in dependency_order(names):
            self._define_once(name, lambda name=name: self._define(name))

    @cached_property
    def archive(self) -> "ArchivedFiles":
        from rollstream.look.query.archive_files import ArchivedFiles

        return ArchivedFiles(self.location, self.connection, self.skip_corrupt, self.warn)

    @cached_property
    def _topic_views(self) -> "TopicViews":
        from rollstream.look.query.base_views import TopicViews

        return TopicViews(self.connection, self.archive, self.view, self.warn)

    def view(self) -> "LogView | None":
        """Returns the view of the run's log and archive, opened once; None without a log."""
        if self._view is None and self.location.bus is not None:
            self._view = self._opened.enter_context(open_run_view(self.location))
        return self._view

    def interrupt(self) -> None:
        """The running query then raises DuckDB's `InterruptException`. Any thread may call this;
        without a query it does nothing.
        """
        if self._cursor is not None:
            self._cursor.interrupt()

    def close(self) -> None:
        self.connection.close()
        self._opened.close()

    def __enter__(self) -> "QuerySession":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _batches(
        self, cursor: duckdb.DuckDBPyConnection, sql: str
    ) -> Iterator[list[tuple[Any, ...]]]:
        with self._explained(sql):
            while rows := interruptibly(cursor, partial(cursor.fetchmany, BATCH_ROWS)):
                yield rows

    @contextmanager
    def _explained(self, sql: str) -> Generator[None]:
        try:
            yield
        except duckdb.Error as error:
            # A damaged file may be the cause: `check` raises `CorruptObject` for it.
            is_invalid_input = isinstance(error, duckdb.InvalidInputException)
            if is_invalid_input or not isinstance(error, _OF_QUERIES):  # perhaps damaged files
                self.check()
            raise explain_error(error, sql) from None

    def _execute(self, sql: str) -> duckdb.DuckDBPyConnection:
        self._cursor = self.connection.cursor()
        return interruptibly(self._cursor, partial(self._cursor.execute, sql))

    def _run(self, sql: str, run: Callable[[str], Converted]) -> Converted:
        if uses_text(sql):
            self._define_once("text_of", lambda: define_text(self.connection, self.location))
        try:
            self.define(views_named_in(sql))
            return run(sql)
        except duckdb.BinderException:
            # Files of an older release lack columns.
            if not self._completed():
                raise
        except duckdb.IOException:
            # The archive merged files since the views were defined.
            if not self._topic_views.renew():
                raise
        self.define(views_named_in(sql))
        return run(sql)

    def _topics(self) -> list[str]:
        return [topic for topic in ARCHIVED_TOPICS if topic in self._defined]

    def _define_once(self, name: str, make: Callable[[], None]) -> None:
        if name not in self._defined:
            make()
            self._defined.add(name)

    def _define(self, name: str) -> None:
        if name == "completions":
            self._define_misplaced()
        if VIEWS[name].query:
            try:
                self._derive(name)
            except duckdb.BinderException:
                if not self._completed():
                    raise
                self._derive(name)
            return
        from rollstream.look.query import base_views

        if name in ARCHIVED_TOPICS:
            self._topic_views.define(name)
        elif name == "evaluations":
            base_views.define_evaluations(self.connection, self.location)
        else:
            base_views.define_settings(self.connection, self.location)

    def _define_misplaced(self) -> None:
        from rollstream.look.query.base_views import define_misplaced

        with ExitStack() as opened:
            # The number of partitions comes from the log, or without one from the archived ledger.
            view = self.view() or opened.enter_context(open_run_view(self.location))
            define_misplaced(self.connection, view.key_partitions("trajectories"))

    def _derive(self, name: str) -> None:
        self.connection.execute(f"CREATE OR REPLACE VIEW {name} AS {VIEWS[name].query}")

    def _completed(self) -> bool:
        """False if no topic's view lacked a column."""
        if not [topic for topic in self._topics() if self._topic_views.complete(topic)]:
            return False
        for name in dependency_order(self._defined & VIEWS.keys()):
            if name in self._defined and VIEWS[name].query:
                self._derive(name)
        return True


def _in_exact_types(sql: str, kinds: Sequence[str]) -> str:
    # Names by position: a query may have several columns of one name.
    columns = [f"c{index}" for index in range(len(kinds))]
    chosen = [
        f"{column}::{_READ_AS[kind]}" if kind in _READ_AS else column
        for column, kind in zip(columns, kinds, strict=True)
    ]
    return f"SELECT {', '.join(chosen)} FROM ({sql}\n) AS t({', '.join(columns)})"


TOKENIZER = "tokenizer.json"
TASK_TOKENIZER = "tokenizer/"
"""The folder of `task.tokenizer` beside the model's files, in the store and in `RUN/model`."""

# In `sources` 0 marks a token of the prompt and 1 a generated one (`streams/records.py`).
MACROS = """
CREATE MACRO prompt_of(tokens, sources) AS list_filter(tokens, lambda t, i: sources[i] = 0);
CREATE MACRO answer_of(tokens, sources) AS list_filter(tokens, lambda t, i: sources[i] = 1);
"""


class TokenText:
    """Converts tokens by a `tokenizer.json`, whose content `load` returns at the first use, without
    importing transformers or torch. Without one the text consists of token numbers. `numbered`
    returns tokens that only the files beside it have.
    """

    def __init__(
        self, load: Callable[[], bytes | None], numbered: Callable[[], Mapping[int, str]] = dict
    ) -> None:
        self._load, self._numbered = load, numbered

    @cached_property
    def _content(self) -> bytes | None:
        return self._load()

    @property
    def is_known(self) -> bool:
        return self._content is not None

    def text(self, tokens: Sequence[int]) -> str:
        """All tokens together, special ones included."""
        if not len(tokens):
            return ""
        if self._content is None:
            return " ".join(str(token) for token in tokens)
        return self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """A token that is only a part of a character is shown as the tokenizer's vocabulary writes
        it.
        """
        if self._content is None:
            return [f"{token} " for token in tokens]
        texts: dict[int, str] = {}
        for token in {int(t) for t in tokens}:
            piece = self._tokenizer.decode([token], skip_special_tokens=False)
            if not piece or "\ufffd" in piece:
                piece = self._tokenizer.id_to_token(token) or f"<{token}>"
            texts[token] = piece
        return [texts[int(token)] for token in tokens]

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        assert self._content is not None
        try:
            tokenizer = Tokenizer.from_buffer(self._content)
            for number, text in sorted(self._numbered().items()):
                if number == tokenizer.get_vocab_size(with_added_tokens=True):
                    tokenizer.add_special_tokens([text])  # pyright: ignore[reportUnknownMemberType]
            return tokenizer
        except Exception as error:  # the library raises nothing narrower
            raise ConfigurationError(f"the run's {TOKENIZER} is no tokenizer: {error}") from error


def run_text(location: RunLocation) -> TokenText:
    """Returns the text by the tokenizer of the run's task, else of its model."""

    def read(name: str) -> bytes | None:
        task_file = None
        if location.table("task").get("tokenizer") is not None:
            task_file = model_file(location, f"{TASK_TOKENIZER}{name}")
        return model_file(location, name) if task_file is None else task_file

    return TokenText(
        lambda: read(TOKENIZER),
        lambda: numbered_tokens(read("tokenizer_config.json"), read("added_tokens.json")),
    )


def define_text(connection: duckdb.DuckDBPyConnection, location: RunLocation) -> None:
    """The SQL functions `text_of(tokens)`, and `prompt_of(tokens, sources)` and `answer_of(tokens,
    sources)`, which return the prompt's and the generated tokens.
    """
    text = run_text(location)

    def decoded(tokens: list[int] | None) -> str:
        return text.text(tokens or ())

    connection.create_function("text_of", decoded, ["UINTEGER[]"], "VARCHAR")  # pyright: ignore[reportArgumentType]
    connection.execute(MACROS)
