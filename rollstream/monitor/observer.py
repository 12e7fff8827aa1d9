"""Observes one run: keeps a `RunState` up to date through a `RunFeed` and returns the metrics and
warnings of the moment.

An observer never writes to the run. A read error does not end it: the error appears in
`RunSnapshot.trouble` and the metrics keep their previous values.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollstream.config.run_folder import (
    RunFolder,
    bus_url,
    open_run_log_for_writing,
    store_url,
)
from rollstream.config.settings import Configuration
from rollstream.deadline import Deadline
from rollstream.errors import RollstreamError
from rollstream.monitor.feed import (
    AGE_ONLY_TOPICS,
    COMPLETION_TOPICS,
    CONTEXT_TOPICS,
    JsonLinesTail,
    RunFeed,
    newest_time,
    tail_positions,
)
from rollstream.monitor.progress import RunStanding, standing_of
from rollstream.monitor.snapshot import (
    RunSettings,
    RunSnapshot,
    RunWarning,
    run_settings_of,
    take_snapshot,
)
from rollstream.monitor.state import RunState
from rollstream.monitor.warnings_flow import (
    LOG_CHECKS,
    MISMATCH_CHECKS,
    PACE_CHECKS,
    STANDSTILL_CHECKS,
)
from rollstream.monitor.warnings_learning import LEARNING_CHECKS
from rollstream.storage.archive.reading import release_memory
from rollstream.storage.log_view import LogView
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import check_reachable
from rollstream.supervisor.supervisor import RoleState

ALL_CHECKS = (*STANDSTILL_CHECKS, *LOG_CHECKS, *MISMATCH_CHECKS, *LEARNING_CHECKS, *PACE_CHECKS)
"""All warnings, most urgent first: no progress, wrong data, nothing to learn from, slowness."""


def warnings_of(at: RunSnapshot) -> tuple[RunWarning, ...]:
    """Returns the warnings about a snapshot; an empty tuple for a healthy run."""
    return tuple(warning for check in ALL_CHECKS for warning in check(at))


CATCH_UP_S = 0.5  # longest read of an old run's log between two frames


@dataclass(slots=True)
class RunObserver:
    """Observes one run from one thread; `open_view` returns None while the run has no log."""

    settings: RunSettings
    metrics: Path
    open_view: Callable[[], LogView | None]
    clock: Callable[[], float]
    started_s: float | None = None
    is_behind: bool = True
    """True while the log holds records that were not read yet."""
    state: RunState = field(init=False)
    _feed: RunFeed | None = None

    def __post_init__(self) -> None:
        self.state = self.settings.state()

    def observe(
        self, roles: Sequence[RoleState] = (), catch_up_s: float = CATCH_UP_S
    ) -> RunSnapshot:
        """Read records for up to `catch_up_s` seconds; returns the present metrics and warnings."""
        trouble = ""
        try:
            self._catch_up(Deadline(catch_up_s))
        except RollstreamError as error:
            trouble = f"the run cannot be read: {error}"
        shown = take_snapshot(self.state, self.settings, self.clock(), roles, self.started_s)
        return replace(shown, trouble=trouble, concerns=warnings_of(shown))

    def _catch_up(self, deadline: Deadline) -> None:
        if self._feed is None:
            view = self.open_view()
            if view is None:
                self.is_behind = False
                return
            self._feed = RunFeed(view, self.metrics)
        self.is_behind = True
        while self.is_behind:
            self.is_behind = self._feed.follow(self.state, self.clock())
            if deadline.passed():
                break
        release_memory()  # of archived files, which a view reads when it is behind truncation


STANDING_TOPICS = ("ledger", "weights", "status")
STANDING_RECORDS = 256  # of each topic: the last steps, versions and heartbeats


def opener_of_run(configuration: Configuration, folder: Path) -> Callable[[], LogView | None]:
    """Returns a function that opens the run's log and archive, or returns None before its log
    exists: opening a missing `sqlite:` log would create it.
    """
    scheme, _, rest = bus_url(configuration, folder).partition(":")

    def opened() -> LogView | None:
        if scheme == "sqlite" and not Path(rest).is_dir():
            return None
        return open_log_and_archive(configuration, folder)

    return opened


def open_log_and_archive(configuration: Configuration, folder: Path) -> LogView:
    """Returns the run's log and archive as one reader. Raises `BusError` at once if no broker
    accepts a connection.
    """
    check_reachable(configuration.bus)
    store = open_store(store_url(configuration, folder), configuration.sync)
    return LogView(open_run_log_for_writing(configuration, folder), store, configuration.run)


def run_standing(configuration: Configuration, folder: RunFolder, now_s: float) -> RunStanding:
    """Returns the run's standing (its step and whether it runs) from about 20 small reads, however
    long the run is. Raises a `RollstreamError` if the log cannot be reached.
    """
    plan = run_settings_of(configuration)
    state = plan.state()
    for line in JsonLinesTail(folder.metrics / "supervisor.jsonl").read():
        state.apply_event(line)
    view = opener_of_run(configuration, folder.path)()
    if view is not None:
        with closing(view):
            _read_tails(view, state)
    return standing_of(state, plan.steps, now_s)


def _read_tails(view: LogView, state: RunState) -> None:
    for topic in (*CONTEXT_TOPICS, *COMPLETION_TOPICS, *AGE_ONLY_TOPICS):
        newest_s = newest_time(view, topic)
        if newest_s is None:
            continue
        state.newest_s[topic] = newest_s
        if topic in STANDING_TOPICS:
            start = tail_positions(view.bus or view, topic, STANDING_RECORDS)
            for one in view.topic(topic, start).poll(STANDING_RECORDS):
                if one.kind == "records" and one.record is not None:
                    state.apply(one.record, one.time_s)
