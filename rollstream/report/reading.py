"""Reads a run for its report: topics up to their present ends, metrics files, configuration."""

import json
from pathlib import Path
from typing import Any

from rollstream.config import flat, load_to_look
from rollstream.folder import RunFolder
from rollstream.live.moves import MOVES, moves_of
from rollstream.live.plan import plan_of
from rollstream.parentage import parentage_of
from rollstream.report.dropped import biases
from rollstream.report.history import History
from rollstream.warnings.of_run import concerns_at_end
from storage.archive.whole import whole_topic
from storage.metrics import read_metrics
from storage.objects import ObjectStore
from streams.bus import Bus

# The ledger first: then the admission of every ended group is read, even if groups end meanwhile.
TOPICS = ("ledger", "admissions", "applied", "weights", "status", "trajectories")


def read_history(bus: Bus, store: ObjectStore, folder: RunFolder) -> History:
    """Returns the run's history up to now; the run may be running, and parts may be missing."""
    settings = flat(load_to_look(folder.configuration)) if folder.configuration.exists() else {}
    history = History(
        configuration=settings,
        warmup=_json(folder.model / "warmup.json"),
        evaluations=read_metrics(folder.metrics / "eval.jsonl"),
        events=read_metrics(folder.metrics / "supervisor.jsonl"),
        moves=moves_of(read_metrics(folder.metrics / MOVES)),
    )
    for topic in TOPICS:
        for record in whole_topic(bus, store, str(settings.get("run", "")), topic):
            history.apply(record)
    if parentage := parentage_of(store):
        history.forked_from = str(parentage)
    if folder.configuration.exists():
        plan = plan_of(load_to_look(folder.configuration))
        seen = concerns_at_end(bus, folder.metrics, plan)
        history.concerns = (*seen, *biases(history.dropped.compared()))
    return history


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
