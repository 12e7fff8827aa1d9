"""`rollstream.open_run(url)`: a run for notebooks, as Arrow tables and as records.

One `Run` sees one state of each topic, from when it was first asked for; open it anew to see what
came since. It reads only, from one thread.
"""
# duckdb and pyarrow ship few types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import pyarrow as pa

from rollstream.analysis.archived import quoted
from rollstream.analysis.place import asked_place
from rollstream.analysis.records import trajectories
from rollstream.analysis.session import Session
from rollstream.analysis.text import Text
from rollstream.analysis.views import VIEWS
from streams.errors import ConfigurationError
from streams.records import GENERATED, PROMPT, Trajectory

log = logging.getLogger(__name__)


class Run:
    """`url` is a run's folder, its config.json, or an archive (a folder or a store's URL); `name`
    is the run wanted of an archive that holds several.
    """

    def __init__(
        self, url: str | None = None, name: str | None = None, skip_corrupt: bool = False
    ) -> None:
        self._place = asked_place(url, name, log.warning)
        self._session = Session(self._place, log.warning, skip_corrupt)
        self._text = Text(self._place.tokenizers())

    @property
    def configuration(self) -> Mapping[str, Any]:
        """The run's settings as its config.json holds them; empty for a mere archive."""
        return self._place.configuration

    @property
    def views(self) -> tuple[str, ...]:
        """Names that `sql` and `table` know."""
        return tuple(VIEWS)

    def sql(self, query: str) -> pa.Table:
        """The answer to one query over the views of `rollstream query`."""
        return self._session.arrow(query, lambda relation: relation.to_arrow_table())

    def table(self, view: str) -> pa.Table:
        """A view whole."""
        if view not in VIEWS:
            raise ConfigurationError(f"no view {view!r}; views: {', '.join(VIEWS)}")
        return self.sql(f"SELECT * FROM {view}")

    def trajectories(self, where: str | None = None) -> Iterator[Trajectory]:
        """The first completion of each trajectory as a record, those that meet an SQL condition on
        the columns of `completions`: archived ones first, then those that only the log has.
        """
        return trajectories(self._session, where)

    def trajectory(self, name: str) -> Trajectory:
        """The record of one trajectory."""
        found = next(self.trajectories(f"trajectory = {quoted(name)}"), None)
        if found is None:
            raise ConfigurationError(f"no trajectory {name!r} finished in {self._place.name}")
        return found

    def tokens_text(self, trajectory: Trajectory | str) -> str:
        """The whole text of a trajectory, special tokens included; token numbers where the run has
        no tokenizer.
        """
        return self._text.text(self._record(trajectory).tokens.tolist())

    def prompt_text(self, trajectory: Trajectory | str) -> str:
        """Of it, the text of its prompt."""
        return self._text_of(self._record(trajectory), PROMPT)

    def answer_text(self, trajectory: Trajectory | str) -> str:
        """Of it, the text of its generated tokens."""
        return self._text_of(self._record(trajectory), GENERATED)

    def close(self) -> None:
        """Let go of the log and the archive."""
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
