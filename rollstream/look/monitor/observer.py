"""Observes one run for the live views and writes nothing to it."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollstream.deadline import Deadline
from rollstream.errors import RollstreamError
from rollstream.look.monitor import feed
from rollstream.look.monitor.concerns import observed_values, warnings_of
from rollstream.look.monitor.machine_use import CoreClock
from rollstream.look.monitor.progress import RunStanding, standing_of
from rollstream.look.monitor.snapshot import (
    RunSettings,
    RunSnapshot,
    RunWarning,
    run_settings_of,
    take_snapshot,
)
from rollstream.look.monitor.state import RunState
from rollstream.look.monitor.warnings_flow import run_unreadable
from rollstream.look.query.locate import locate_run
from rollstream.look.query.looking import metrics_folder, run_view
from rollstream.metric_values import MetricValues
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.run.supervisor.supervisor import RoleState
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.archive.reading import release_memory

# Reading a long log is cut into calls of this length: the view is redrawn between.
CATCH_UP_S = 0.5


@dataclass(slots=True)
class RunObserver:
    """Observes a run for one thread. `metrics` is the folder of the metrics files. `open_view`
    opens log and archive, or returns None while there is no log. `clock`, and `started_s`, when the
    observing process started the run (None: it did not), are in seconds since the epoch.
    """

    settings: RunSettings
    metrics: Path
    open_view: Callable[[], LogView | None]
    clock: Callable[[], float]
    started_s: float | None = None
    is_behind: bool = True
    """Until all records were read that the log held when the observer opened it, or until a read
    fails; the caller should then call `observe` again at once.
    """
    cores: CoreClock = field(default_factory=CoreClock)
    has_read: bool = field(default=False, init=False)
    state: RunState = field(init=False)
    _feed: feed.RunFeed | None = None
    _newest: RunSnapshot | None = None
    _concerns: tuple[RunWarning, ...] = ()

    def __post_init__(self) -> None:
        self.state = self.settings.state()

    def observe(
        self, roles: Sequence[RoleState] = (), catch_up_s: float = CATCH_UP_S
    ) -> RunSnapshot:
        """Reads for about `catch_up_s` seconds at most. A read error is in `RunSnapshot.trouble`,
        and values from the log stay those of the last read. `roles` are the states of the run's
        processes, if the caller supervises them.
        """
        self.has_read, now_s = False, self.clock()
        try:
            now_s = self._catch_up(Deadline(catch_up_s))
            self.has_read = True
            trouble = "" if self._feed is None else self._feed.store_trouble
            trouble = trouble and f"the run's store cannot be read: {trouble}"
        except RollstreamError as error:
            # A caller that looks again at once would never pause.
            self.is_behind = False
            trouble = f"the run cannot be read: {error}"
        shown = take_snapshot(self.state, self.settings, now_s, roles, self.started_s)
        if self.settings.is_one_machine:
            shown = replace(shown, machine=self.cores.use())
        # Without a read its absence would be a concern of the run.
        if self.has_read:
            self._concerns = warnings_of(shown)
        shown = replace(shown, trouble=trouble)
        shown = replace(shown, concerns=(*run_unreadable(shown), *self._concerns))
        if not self.is_behind:
            self._newest = shown
        return shown

    def metric_values(self) -> MetricValues:
        """Returns the metric values of the newest snapshot that was not behind; {} before the first
        one. Any thread may call it.
        """
        newest = self._newest
        return {} if newest is None else observed_values(newest)

    def _catch_up(self, deadline: Deadline) -> float:
        now_s = self.clock()
        if self._feed is None:
            view = self.open_view()
            if view is None:
                self.is_behind = False
                return now_s
            self._feed = feed.RunFeed(view, self.metrics)
        self.is_behind = True
        while self.is_behind:
            # The time before the last read counts: a broker that was started again may take half a
            # minute for an answer behind the heartbeats, which were then not sent late.
            now_s = self.clock()
            self.is_behind = self._feed.follow(self.state, now_s)
            if deadline.passed():
                break
        # Records that were truncated from the log before they were read come from archived files,
        # and reading these leaves memory allocated.
        release_memory()
        return now_s


# A view waits no longer for the store, and shows that it does not answer.
STORE_S = 10.0
STANDING_TOPICS = ("ledger", "weights", "status")
# The last steps, versions and heartbeats, of each of these topics.
STANDING_RECORDS = 256


def opener_of_run(folder: Path, is_trusted: bool = False) -> Callable[[], LogView | None]:
    """Opens log and archive for reading only, or returns None while a `sqlite:` log
    does not exist.
    """

    def opened() -> LogView | None:
        location = locate_run(str(folder), is_trusted)
        # Refuses files that leave the run.
        metrics_folder(location)
        return None if location.bus is None else run_view(location, STORE_S)

    return opened


def run_standing(configuration: Configuration, folder: RunFolder, now_s: float) -> RunStanding:
    """Returns the standing from about 20 small reads, however long the log is. Raises a
    `RollstreamError` if the log cannot be reached.
    """
    plan = run_settings_of(configuration)
    state = plan.state()
    view = opener_of_run(folder.path)()
    for line in feed.JsonLinesTail(folder.metrics / "supervisor.jsonl").read():
        state.apply_event(line)
    if view is not None:
        with closing(view):
            _read_tails(view, state)
    return standing_of(state, plan.steps, now_s, plan.is_evaluated)


def _read_tails(view: LogView, state: RunState) -> None:
    for topic in (*feed.CONTEXT_TOPICS, *feed.COMPLETION_TOPICS, *feed.AGE_ONLY_TOPICS):
        newest_s = feed.newest_time(view, topic)
        if newest_s is None:
            continue
        state.newest_s[topic] = newest_s
        if topic in STANDING_TOPICS:
            start = feed.tail_positions(view.bus or view, topic, STANDING_RECORDS)
            for message in view.topic(topic, start).poll(STANDING_RECORDS):
                if message.kind == "records" and message.record is not None:
                    state.apply(message.record, message.time_s)
