"""Opens a finished, stopped or running run and reads its history, without writing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollstream.config.config import flat_settings, load_for_viewing
from rollstream.config.run_folder import RunFolder, open_run_log_for_writing, store_url
from rollstream.errors import ConfigurationError
from rollstream.monitor.moves import MOVES_FILE, parse_moves
from rollstream.monitor.observer import warnings_at_end
from rollstream.monitor.snapshot import run_settings_of
from rollstream.report.dropped import drop_bias_warnings
from rollstream.report.history import RunHistory
from rollstream.runs.parentage import read_parentage
from rollstream.storage.log_view import LogView
from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import Bus
from rollstream.streams.topics import catalogue

# The ledger first: then the admission of every ended group is read, even if groups end meanwhile.
REPORT_TOPICS = ("ledger", "admissions", "applied", "weights", "status", "trajectories")


def read_history(bus: Bus, store: ObjectStore, folder: RunFolder) -> RunHistory:
    """Returns the run's history up to now; the run may be running, and parts may be missing."""
    settings = (
        flat_settings(load_for_viewing(folder.configuration))
        if folder.configuration.exists()
        else {}
    )
    history = RunHistory(
        configuration=settings,
        warmup=_json(folder.model / "warmup.json"),
        evaluations=read_metrics(folder.metrics / "eval.jsonl"),
        events=read_metrics(folder.metrics / "supervisor.jsonl"),
        moves=parse_moves(read_metrics(folder.metrics / MOVES_FILE)),
    )
    view = LogView(bus, store, str(settings.get("run", "")))
    for topic in REPORT_TOPICS:
        for one in view.topic(topic).records():
            assert one.record is not None
            history.apply(one.record)
    if parentage := read_parentage(store):
        history.forked_from = str(parentage)
    if folder.configuration.exists():
        plan = run_settings_of(load_for_viewing(folder.configuration))
        seen = warnings_at_end(bus, folder.metrics, plan)
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
    bus = open_run_log_for_writing(configuration, folder.path)
    try:
        bus.create(catalogue())  # a prepared run that never started has no topics yet
        store = open_store(store_url(configuration, folder.path), configuration.sync)
        return read_history(bus, store, folder)
    finally:
        bus.close()


def distinct_names(folders: Sequence[RunFolder]) -> list[str]:
    """Returns distinct names of the runs: their folders' names, or full paths if two are equal."""
    names = [folder.path.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]
