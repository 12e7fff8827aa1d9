"""One run in the explorer: its index, single records, texts, and the state that `rollstream top`
shows. A thread follows the run while a page watches, and writes nothing to it.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rollstream.consumers.trainer.data.training_rule import TrainingRule
from rollstream.errors import ConfigurationError, RollstreamError
from rollstream.look.explorer.record_reader import RecordReader
from rollstream.look.explorer.simulated import SimulatedLocation
from rollstream.look.index.audit_policy import audit_policy
from rollstream.look.index.index_reader import IndexReader
from rollstream.look.index.run_index import IndexProgress, RunIndex
from rollstream.look.monitor.concerns import warnings_of
from rollstream.look.monitor.feed import RunFeed
from rollstream.look.monitor.sessions import RunSessions
from rollstream.look.monitor.snapshot import (
    RunSettings,
    RunSnapshot,
    run_settings_of,
    take_snapshot,
)
from rollstream.look.monitor.state import RunState
from rollstream.look.query.locate import CONFIGURATION, RunLocation
from rollstream.look.query.looking import metrics_folder, open_run_view
from rollstream.look.query.session import run_text
from rollstream.look.query.token_scores import TOKEN_SCORES_FILE
from rollstream.run.config.config import flat_settings, load_for_viewing
from rollstream.run.config.errors import printable_value
from rollstream.run.config.settings import Configuration
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.metrics_file import read_metrics

log = logging.getLogger(__name__)

# Shortest and longest pause between two reads of a living run.
EVERY_S, PAUSE_MAX_S = 1.0, 10.0
# Of one core, for reading and showing a living run, within the longest pause: the machine may be
# the one that trains.
CORE_SHARE = 0.015
# Between two listings of an archive without a log; each costs requests of the store.
LISTED_S = 5.0
WATCHED_S = 15.0  # a run is followed so long after the last request
TAIL_RECORDS = 2000  # of the ledger for the state; the index has all of it
CATCH_UP_S = 2.0
AGAIN_S = 5.0  # after an error, before the next attempt

# Receives an event's name and its data, in the run's thread.
Notify = Callable[[str, dict[str, Any]], None]


class ExploredRun:
    """Holds what the explorer reads of one run; `number` is its place in the command line, `clock`
    returns seconds since the epoch. A context manager.
    """

    def __init__(
        self, number: int, location: RunLocation, notify: Notify, clock: Callable[[], float]
    ) -> None:
        self.number, self.location = str(number), location
        self.name = location.run or self.folder_name
        """The run's name for the user; with its folder's if several runs have one name."""
        self.index = RunIndex(location.max_lag, location.process_rewards)
        self.records = RecordReader(location, self.index)
        self.text = run_text(location)
        self.trouble = ""
        self.snapshot: RunSnapshot | None = None
        self.state: RunState | None = None
        self._notify, self._clock = notify, clock
        self._stop = threading.Event()
        self._watched_s = clock()
        self._thread = threading.Thread(target=self._follow, name=f"explorer-{number}", daemon=True)
        self._thread.start()

    @property
    def folder_name(self) -> str:
        folder = self.location.folder
        return self.location.name if folder is None else folder.name

    @cached_property
    def configuration(self) -> Configuration | None:
        """The run's settings; None if only an archive is known or they cannot be read."""
        folder = self.location.folder
        if folder is None or not self.location.has_file(CONFIGURATION):
            return None
        try:
            return load_for_viewing(folder / CONFIGURATION)
        except RollstreamError as error:
            log.warning("%s: settings are not shown: %s", self.location.name, error)
            return None

    @cached_property
    def settings(self) -> dict[str, str]:
        """Every setting as text by its dotted key, without secrets."""
        if isinstance(self.location, SimulatedLocation):
            return self.location.settings()
        flat = {} if self.configuration is None else flat_settings(self.configuration)
        return {key: printable_value(key, value, _setting_text) for key, value in flat.items()}

    @property
    def token_scores(self) -> Path | None:
        """The path of the file with the trainer's scores of tokens, which need not exist; None if
        only a store is known.
        """
        folder = self.location.folder
        return None if folder is None else self.location.files.path(TOKEN_SCORES_FILE)

    @property
    def has_weights(self) -> bool:
        """False if the run's store is a folder without weights."""
        scheme, _, rest = self.location.store.partition(":")
        return scheme != "file" or (Path(rest.removeprefix("//")) / "weights").is_dir()

    @property
    def state_number(self) -> int:
        """Changes with the index and the token scores, on which answers about the index depend."""
        try:
            scores = 0 if self.token_scores is None else self.token_scores.stat().st_mtime_ns
        except OSError:
            scores = 0
        return self.index.changes + scores

    @cached_property
    def rule(self) -> TrainingRule | None:
        """The trainer's rule for which samples are trained; None if settings are missing or a part
        of the rule is code of the user.
        """
        return audit_policy(self.location).rule

    @property
    def replayed(self) -> str | None:
        """The name of the run that this one repeats, None if it is no replay."""
        try:
            return self.location.run if self.location.is_replay else None
        except ConfigurationError:
            # A link in its place leaves the run and is not followed.
            return None

    def sessions(self) -> RunSessions:
        """Returns the sessions of `rollstream run` that its supervisors recorded."""
        sessions = RunSessions()
        for line in self.supervised():
            sessions.apply(line)
        return sessions

    def supervised(self) -> list[dict[str, Any]]:
        """Returns the lines of `supervisor.jsonl` that have a time."""
        path = metrics_folder(self.location) / "supervisor.jsonl"
        lines = read_metrics(path) if path.is_file() else []
        return [line for line in lines if isinstance(line.get("time_s"), int | float)]

    def watch(self) -> None:
        """Follow the run for another `WATCHED_S` seconds."""
        self._watched_s = self._clock()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)
        self.records.close()
        self.index.close()

    def __enter__(self) -> "ExploredRun":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                with ExitStack() as opened:
                    self._read(opened.enter_context(open_run_view(self.location)))
            except RollstreamError as error:
                self._report_trouble(str(error))
            except Exception as error:
                # A record may be of a kind that no reader expects.
                log.warning("%s cannot be read", self.location.name, exc_info=True)
                self._report_trouble(f"{type(error).__name__}: {error}")

    def _report_trouble(self, trouble: str) -> None:
        # No error ends the thread: the next attempt begins after `AGAIN_S`.
        self.trouble = trouble
        log.warning("%s cannot be read: %s", self.location.name, trouble)
        self._notify("change", self.change())
        self._stop.wait(AGAIN_S)

    def _read(self, view: LogView) -> None:
        reader = IndexReader(view, self.index, self._progressed, self._stop.is_set)
        feed, plan, state = self._feed(view)
        # Of all threads: requests and DuckDB count too.
        is_first, used_s = True, time.process_time()
        while not self._stop.is_set():
            if is_first or self._clock() - self._watched_s < WATCHED_S:
                # An archive has no heartbeats.
                if view.bus is not None:
                    self._observe(feed, plan, state)
                changed = reader.refresh()
                self.trouble = ""
                if changed or is_first:
                    self._notify("change", self.change())
            before_s, used_s = used_s, time.process_time()
            least_s = EVERY_S if view.bus is not None else LISTED_S
            self._stop.wait(least_s if is_first else pause_s(used_s - before_s, least_s))
            is_first = False

    def _feed(self, view: LogView) -> tuple[RunFeed, RunSettings, RunState]:
        configuration = self.configuration or Configuration()
        plan = run_settings_of(configuration)
        plan = replace(plan, run=view.run)
        state = plan.state()
        return RunFeed(view, metrics_folder(self.location), TAIL_RECORDS), plan, state

    def _observe(self, feed: RunFeed, plan: RunSettings, state: RunState) -> None:
        until_s = time.monotonic() + CATCH_UP_S
        while feed.follow(state, self._clock()) and time.monotonic() < until_s:
            if self._stop.is_set():
                return
        shown = take_snapshot(state, plan, self._clock())
        self.snapshot = replace(shown, concerns=warnings_of(shown))
        self.state = state

    def _progressed(self, progress: IndexProgress) -> None:
        self._notify("index", {"run": self.number, **progress.line()})

    def change(self) -> dict[str, Any]:
        """Returns the data of the event `change`."""
        shown = self.snapshot
        return {
            "run": self.number,
            "step": self.index.value("SELECT max(step) FROM done") or 0,
            "trajectories": self.index.progress.trajectories,
            "version": None if shown is None else shown.version,
            "phase": self.phase(),
            "newest_s": None
            if self.state is None
            else max(self.state.newest_s.values(), default=None),
        }

    def phase(self) -> str:
        """Returns the run's phase in a word (docs/how-to/explore-a-run.md)."""
        if isinstance(self.location, SimulatedLocation):
            return "finished"
        if self.location.bus is None:
            return "archived"
        if self.snapshot is None:
            return "starting"
        shown = self.snapshot
        if shown.is_over or (shown.is_quiet and self.replayed is not None):
            return "finished"
        if shown.is_quiet:
            return "stopped"
        return "starting" if shown.is_starting or not shown.step else "training"


def pause_s(used_s: float, least_s: float = EVERY_S) -> float:
    """Returns the seconds to wait before the next read, if the process used `used_s` seconds of
    processor time since the last pause began.
    """
    return min(PAUSE_MAX_S, max(least_s, used_s / CORE_SHARE))


def _setting_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
