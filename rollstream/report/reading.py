"""Opens a finished, stopped or running run and reads its history, without writing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollstream.config.config import flat_settings, load_for_viewing
from rollstream.config.run_folder import RunFolder, open_run_log_for_writing, store_url
from rollstream.errors import ConfigurationError
from rollstream.monitor.feed import RunFeed
from rollstream.monitor.observer import warnings_of
from rollstream.monitor.snapshot import run_settings_of, take_snapshot
from rollstream.monitor.state import MOVES_FILE, RunState, parse_moves
from rollstream.report.history import RunHistory, drop_bias_warnings
from rollstream.runs.parentage import read_parentage
from rollstream.storage.log_view import LogView
from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import check_reachable
from rollstream.streams.topics import catalogue


def read_history(view: LogView, folder: RunFolder) -> RunHistory:
    """Returns the run's history up to now, log and archive; the run may be running, and parts may
    be missing. Its warnings are those that `rollstream top` showed when the newest record was
    written: a report written a week later does not call the run silent.
    """
    found = folder.configuration.exists()
    configuration = load_for_viewing(folder.configuration) if found else None
    plan = configuration and run_settings_of(configuration)
    history = RunHistory(
        state=plan.state() if plan else RunState(),
        configuration=flat_settings(configuration) if configuration else {},
        warmup=_json(folder.model / "warmup.json"),
        evaluations=read_metrics(folder.metrics / "eval.jsonl"),
        events=read_metrics(folder.metrics / "supervisor.jsonl"),
        moves=parse_moves(read_metrics(folder.metrics / MOVES_FILE)),
    )
    feed = RunFeed(view, folder.metrics, None, history.extend)
    while feed.follow(history.state, 0.0):
        pass
    if view.store is not None and (parentage := read_parentage(view.store)):
        history.forked_from = str(parentage)
    if plan:
        newest_s = max(history.state.newest_s.values(), default=0.0)
        seen = warnings_of(take_snapshot(history.state, plan, newest_s))
        history.concerns = (*seen, *drop_bias_warnings(history.dropped.compared()))
    return history


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def run_folder(path: str | Path) -> RunFolder:
    """Returns the run at `path`, its folder or its `config.json`; raises without a run there."""
    given = Path(path).absolute()
    folder = RunFolder(given.parent if given.name == "config.json" else given)
    if not folder.configuration.exists():
        raise ConfigurationError(f"{folder.path} holds no run (no config.json there)")
    return folder


def open_history(folder: RunFolder) -> RunHistory:
    """Returns the run's history, read from its log and metrics files up to now."""
    configuration = load_for_viewing(folder.configuration)
    check_reachable(configuration.bus)
    bus = open_run_log_for_writing(configuration, folder.path)
    try:
        bus.create(catalogue())  # a prepared run that never started has no topics yet
        store = open_store(store_url(configuration, folder.path), configuration.sync)
        return read_history(LogView(bus, store, configuration.run), folder)
    finally:
        bus.close()


def distinct_names(folders: Sequence[RunFolder]) -> list[str]:
    """Returns distinct names of the runs: their folders' names, or full paths if two are equal."""
    names = [folder.path.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]
