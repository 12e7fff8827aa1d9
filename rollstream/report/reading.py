"""Reads a run for its report: topics up to their present ends, metrics files, configuration."""

import json
from pathlib import Path
from typing import Any

from rollstream.config.config import flat_settings, load_for_viewing
from rollstream.config.run_folder import RunFolder
from rollstream.monitor.moves import MOVES_FILE, parse_moves
from rollstream.monitor.plan import run_settings_of
from rollstream.runs.parentage import read_parentage
from rollstream.report.dropped import drop_bias_warnings
from rollstream.report.history import RunHistory
from rollstream.monitor.of_run import warnings_at_end
from rollstream.storage.archive.whole import whole_topic
from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus

# The ledger first: then the admission of every ended group is read, even if groups end meanwhile.
REPORT_TOPICS = ("ledger", "admissions", "applied", "weights", "status", "trajectories")


def read_history(bus: Bus, store: ObjectStore, folder: RunFolder) -> RunHistory:
    """Returns the run's history up to now; the run may be running, and parts may be missing."""
    settings = flat_settings(load_for_viewing(folder.configuration)) if folder.configuration.exists() else {}
    history = RunHistory(
        configuration=settings,
        warmup=_json(folder.model / "warmup.json"),
        evaluations=read_metrics(folder.metrics / "eval.jsonl"),
        events=read_metrics(folder.metrics / "supervisor.jsonl"),
        moves=parse_moves(read_metrics(folder.metrics / MOVES_FILE)),
    )
    for topic in REPORT_TOPICS:
        for record in whole_topic(bus, store, str(settings.get("run", "")), topic):
            history.apply(record)
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
