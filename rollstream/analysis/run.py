"""`rollstream.open_run(url)`: read-only access to a run, as Arrow tables and as records.

A `Run` sees each topic as of its first use; open another one to see newer records. Use it from one
thread.
"""

import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import pyarrow as pa

from rollstream.analysis.archive_files import sql_literal
from rollstream.analysis.locate import locate_asked_run
from rollstream.analysis.session import QuerySession
from rollstream.analysis.text import TokenText
from rollstream.analysis.trajectory import trajectory_records
from rollstream.analysis.views import VIEWS
from rollstream.errors import ConfigurationError
from rollstream.streams.records import GENERATED, PROMPT, Trajectory

log = logging.getLogger(__name__)


class Run:
    """`url` is a run's folder, its config.json, or an archive (a folder or a store's URL). `name`
    selects the run if an archive holds several.
    """

    def __init__(
        self, url: str | None = None, name: str | None = None, skip_corrupt: bool = False
    ) -> None:
        self._place = locate_asked_run(url, name, log.warning)
        self._session = QuerySession(self._place, log.warning, skip_corrupt)
        self._text = TokenText(self._place.tokenizers())

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The run's settings, as in its config.json; empty if only an archive is known."""
        return self._place.configuration

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the views for `sql` and `table`."""
        return tuple(VIEWS)

    def sql(self, query: str) -> pa.Table:
        """Returns the result of one query over the views of `rollstream query`."""
        return self._session.arrow(query, lambda relation: relation.to_arrow_table())

    def table(self, view: str) -> pa.Table:
        """Returns a whole view."""
        if view not in VIEWS:
            raise ConfigurationError(f"no view {view!r}; views: {', '.join(VIEWS)}")
        return self.sql(f"SELECT * FROM {view}")

    def trajectories(self, where: str | None = None) -> Iterator[Trajectory]:
        """Yields the first completion of each trajectory as a record, archived ones first. `where`
        is an SQL condition on the columns of `completions`.
        """
        return trajectory_records(self._session, where)

    def trajectory(self, name: str) -> Trajectory:
        """Returns the record of one trajectory; raises `ConfigurationError` if it is unknown."""
        found = next(self.trajectories(f"trajectory = {sql_literal(name)}"), None)
        if found is None:
            raise ConfigurationError(f"no trajectory {name!r} finished in {self._place.name}")
        return found

    def tokens_text(self, trajectory: Trajectory | str) -> str:
        """Returns the whole text of a trajectory, special tokens included. Without a tokenizer it
        returns token numbers.
        """
        return self._text.text(self._record(trajectory).tokens.tolist())

    def prompt_text(self, trajectory: Trajectory | str) -> str:
        """Returns the text of a trajectory's prompt."""
        return self._text_of(self._record(trajectory), PROMPT)

    def answer_text(self, trajectory: Trajectory | str) -> str:
        """Returns the text of a trajectory's generated tokens."""
        return self._text_of(self._record(trajectory), GENERATED)

    def close(self) -> None:
        """Close the log and the archive."""
        self._session.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _record(self, trajectory: Trajectory | str) -> Trajectory:
        return self.trajectory(trajectory) if isinstance(trajectory, str) else trajectory

    def _text_of(self, record: Trajectory, source: int) -> str:
        return self._text.text(record.tokens[record.sources == source].tolist())
