"""Reads trajectories of a run from archive and log, through the SQL views of `rollstream query`.
`Run` is the public interface, which `rollstream.open_run(url)` returns.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from rollstream.errors import ConfigurationError, DecodeError
from rollstream.look.query.archive_files import sql_literal
from rollstream.look.query.fields import record_values
from rollstream.look.query.locate import locate_asked_run
from rollstream.look.query.output import json_value
from rollstream.look.query.session import QuerySession, TokenText, run_text
from rollstream.look.query.views import VIEWS
from rollstream.storage.archive.schema import arrow_schema
from rollstream.storage.archive.tables import records_of
from rollstream.streams.codec import decode
from rollstream.streams.records import GENERATED, PROMPT, Assignment, Partial, Record, Trajectory

BATCH_ROWS = 256  # per batch in memory


def trajectory_records(
    session: QuerySession, where: str | None = None, view: str = "completions"
) -> Iterator[Trajectory]:
    """Returns rows of a view that meet the SQL condition `where`, archived ones first. Void records
    (invariant 7) and rows that are not a record are left out.
    """
    condition = "true" if where is None else where
    sql = f"SELECT * FROM {view} WHERE ({condition}) AND reason IS NULL AND NOT void"
    for table in archive_tables(session, sql):
        for record in records_of(table):
            if isinstance(record, Trajectory):
                yield record


def archive_tables(session: QuerySession, sql: str) -> Iterator[pa.Table]:
    """Yields the tables in batches, with the archive's columns for `trajectories`; columns that the
    query does not return are missing.
    """
    reader: Any = session.arrow(sql, lambda relation: relation.to_arrow_reader(BATCH_ROWS))
    present = set(reader.schema.names)
    schema = pa.schema([field for field in arrow_schema("trajectories") if field.name in present])
    try:
        for batch in reader:
            yield pa.Table.from_batches([batch]).select(schema.names).cast(schema)
    except (pa.ArrowException, OSError):  # DuckDB's errors, wrapped by Arrow
        session.check()
        raise


NAMES_SHOWN = 8
ViewRow = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrajectoryDetails:
    """View rows are column → value. `record` is the first completion, which is the valid one
    (invariant 2), None until it finishes; `completions` counts all of them, late ones included.
    `trained` has `done` too, the time of the step. `assignments` and `partials` are those that the
    log still holds.
    """

    trajectory: str
    record: Trajectory | None
    completions: int
    reward: ViewRow | None
    annotations: Sequence[ViewRow]
    spans: Sequence[ViewRow]
    trained: Sequence[ViewRow]
    group: ViewRow | None
    assignments: Sequence[Assignment]
    partials: Sequence[Partial]


def trajectory_names(
    session: QuerySession, name: str | None, group: int | None, last: bool
) -> list[str]:
    """All of `group`; else, with `last`, the one that finished last; else the one whose name is
    `name` or begins with it. Raises `ConfigurationError` if there is none, or if several names
    begin with `name`.
    """
    if group is not None:
        rows = _rows(session, f'FROM admissions SELECT trajectories WHERE "group" = {group}')
        names = [t for row in rows for t in row["trajectories"] or ()]
        if not names:
            raise ConfigurationError(f"no group {group} was admitted in {session.location.name}")
        return names
    if last:
        newest = 'ORDER BY timestamp DESC, "offset" DESC LIMIT 1'
        rows = _rows(session, f"SELECT trajectory FROM completions {newest}")
    elif name is None:
        raise ConfigurationError("no trajectory given: give its name, --group N or --last")
    else:
        rows = _by_name(session, name)
    if not rows:
        problem = "no trajectory finished yet" if last else f"no trajectory is called {name!r}…"
        raise ConfigurationError(f"{problem} in {session.location.name}")
    return [str(rows[0]["trajectory"])]


def trajectory_details(session: QuerySession, trajectory: str) -> TrajectoryDetails:
    """Returns the trajectory details of this complete name."""
    name = sql_literal(trajectory)
    completions = list(trajectory_records(session, f"trajectory = {name}", "trajectories"))

    def rows_of(view: str, order: str) -> list[ViewRow]:
        return _rows(session, f"FROM {view} WHERE trajectory = {name} ORDER BY {order}")

    admitted = f'SELECT "group" FROM admissions WHERE list_contains(trajectories, {name})'
    groups = _rows(session, f'FROM groups WHERE "group" IN ({admitted})')
    return TrajectoryDetails(
        trajectory,
        completions[0] if completions else None,
        len(completions),
        next(iter(rows_of("rewards", "ALL")), None),
        rows_of("scores", "name"),
        rows_of("spans", "start"),
        rows_of("trained LEFT JOIN (SELECT step, done FROM steps) USING (step)", "taken"),
        next(iter(groups), None),
        [r for r in _keyed(session, "assignments", trajectory) if isinstance(r, Assignment)],
        [r for r in _keyed(session, "partials", trajectory) if isinstance(r, Partial)],
    )


def _by_name(session: QuerySession, name: str) -> list[ViewRow]:
    admitted = "(SELECT unnest(trajectories) AS trajectory FROM admissions)"
    # Admitted trajectories, finished or not.
    rows = _rows(
        session, f"SELECT trajectory FROM {admitted} WHERE trajectory = {sql_literal(name)}"
    )
    if rows:
        return rows
    rows = _rows(
        session,
        f"SELECT DISTINCT trajectory FROM {admitted} "
        f"WHERE starts_with(trajectory, {sql_literal(name)}) "
        f"ORDER BY ALL LIMIT {NAMES_SHOWN + 1}",
    )
    if len(rows) > 1:
        names = [str(row["trajectory"]) for row in rows]
        more = ", …" if len(names) > NAMES_SHOWN else ""
        raise ConfigurationError(
            f"{name!r} begins several names: {', '.join(names[:NAMES_SHOWN])}{more}"
        )
    return rows


def _keyed(session: QuerySession, topic: str, key: str) -> Iterator[Record]:
    view, key_bytes = session.view(), key.encode()
    if view is None or not view.has(topic):
        return
    for segment in view.topic(topic, view.begin(topic)).segments():
        for message in segment if isinstance(segment, list) else ():
            # Records of other keys are not decoded.
            if message.key == key_bytes and message.value is not None:
                with suppress(DecodeError):
                    yield decode(message.value).record


def _rows(session: QuerySession, sql: str) -> list[ViewRow]:
    answer = session.answer(sql)
    return [dict(zip(answer.names, row, strict=True)) for rows in answer.batches for row in rows]


def details_json(details: TrajectoryDetails, text: TokenText) -> dict[str, Any]:
    """Returns the details with the names of the fields, but `orders` for the assignments. `record`
    also has `pieces`, the text of each token, null without a tokenizer.
    """
    json_fields = {part.name: getattr(details, part.name) for part in fields(details)}
    if details.record is not None:
        pieces = text.pieces(details.record.tokens.tolist()) if text.is_known else None
        json_fields["record"] = record_values(details.record, with_arrays=True) | {"pieces": pieces}
    json_fields["orders"] = [record_values(record) for record in json_fields.pop("assignments")]
    json_fields["partials"] = [record_values(record) for record in json_fields.pop("partials")]
    return json_value(json_fields)


log = logging.getLogger(__name__)


class Run:
    """Reads a run as Arrow tables and as records, from one thread. A `Run` sees each topic as of
    its first use; open another one to see newer records.

    `url` is a run's folder, its config.json, or an archive (a folder or a store's URL); None is the
    newest run in `runs/`. `name` selects the run if an archive holds several. A damaged file of the
    archive raises an error, or is left out with a warning if `skip_corrupt` is set.
    """

    def __init__(
        self, url: str | None = None, name: str | None = None, skip_corrupt: bool = False
    ) -> None:
        self._place = locate_asked_run(url, name, log.warning)
        self._session = QuerySession(self._place, log.warning, skip_corrupt)
        self._text = run_text(self._place)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """Returns the configuration as in config.json; empty if only an archive is known."""
        return self._place.configuration

    @property
    def views(self) -> tuple[str, ...]:
        """Returns the views for `sql` and `table`."""
        return tuple(VIEWS)

    def sql(self, query: str) -> pa.Table:
        return self._session.arrow(query, lambda relation: relation.to_arrow_table())

    def table(self, view: str) -> pa.Table:
        """Raises `ConfigurationError` if there is no such view."""
        if view not in VIEWS:
            raise ConfigurationError(f"no view {view!r}; views: {', '.join(VIEWS)}")
        return self.sql(f"SELECT * FROM {view}")

    def trajectories(self, where: str | None = None) -> Iterator[Trajectory]:
        """The first completion of each, archived ones first. `where` is an SQL condition on the
        columns of `completions`.
        """
        return trajectory_records(self._session, where)

    def trajectory(self, name: str) -> Trajectory:
        """Its first completion; raises `ConfigurationError` if no such trajectory finished."""
        record = next(self.trajectories(f"trajectory = {sql_literal(name)}"), None)
        if record is None:
            raise ConfigurationError(f"no trajectory {name!r} finished in {self._place.name}")
        return record

    def tokens_text(self, trajectory: Trajectory | str) -> str:
        """Returns the text of a record or name, special tokens included. Without a tokenizer the
        text consists of token numbers.
        """
        return self._text.text(self._record(trajectory).tokens.tolist())

    def prompt_text(self, trajectory: Trajectory | str) -> str:
        """Returns the prompt text as `tokens_text`."""
        return self._text_of(self._record(trajectory), PROMPT)

    def answer_text(self, trajectory: Trajectory | str) -> str:
        """Returns the answer's text as `tokens_text`, without replies of an environment."""
        return self._text_of(self._record(trajectory), GENERATED)

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _record(self, trajectory: Trajectory | str) -> Trajectory:
        return self.trajectory(trajectory) if isinstance(trajectory, str) else trajectory

    def _text_of(self, record: Trajectory, source: int) -> str:
        return self._text.text(record.tokens[record.sources == source].tolist())
