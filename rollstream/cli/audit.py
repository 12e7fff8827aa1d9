"""`rollstream audit [RUN]`: checks a run against invariants 1 to 7, read-only (docs/audit.md).

Exit codes: 0 all invariants hold, 1 at least one is violated, 2 none is violated but parts of the
run could not be checked.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.trainer.data.prepare import TrainingRule, training_rule
from rollstream.analysis.live import open_run_log
from rollstream.analysis.locate import REPLAY_FILE, RunLocation, locate_asked_run
from rollstream.cli.audited import audit_report_json, audit_report_lines
from rollstream.cli.pipes import quiet_on_closed_pipe
from rollstream.storage.archive.names import ARCHIVE_PREFIX, parse_archive_key
from rollstream.storage.hf_folder import hf_vocabulary_size
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.admissible import TrainingBounds
from rollstream.errors import ConfigurationError, RollstreamError

if TYPE_CHECKING:  # importing pydantic takes longer than the audit of a small run
    from rollstream.consumers.settings import TrainerSettings

KEPT, VIOLATED, UNCHECKED = 0, 1, 2


@quiet_on_closed_pipe
def main(arguments: argparse.Namespace) -> int:
    """Print one line per invariant, with the first offenders."""
    place = locate_asked_run(arguments.run, arguments.name, warn)
    if place.folder is not None and (place.folder / REPLAY_FILE).is_file():
        raise ConfigurationError(f"{place.name} is a replay; audit the replayed run instead")
    progress = _progress_printer()
    try:
        with ExitStack() as opened:
            audit = _opened(place, progress, opened)
            tallies = audit.check()
    except ConfigurationError:
        raise
    except RollstreamError as error:
        progress("")
        warn(f"{place.name} could not be read to its end: {error}")
        return UNCHECKED
    progress("")
    if arguments.json:
        print(json.dumps(audit_report_json(place.name, audit.run, tallies, audit.coverage)))
    else:
        width = shutil.get_terminal_size().columns
        print("\n".join(audit_report_lines(place.name, audit.run, tallies, audit.coverage, width)))
    states = {tally.state for tally in tallies}
    if "violated" in states:
        return VIOLATED
    return UNCHECKED if "unchecked" in states else KEPT


def _opened(place: RunLocation, progress: Callable[[str], None], opened: ExitStack) -> Audit:
    """Returns the audit of log, store, or both."""
    store = open_store(place.store) if place.has_store else None
    if store is None and place.bus is None:
        raise ConfigurationError(f"{place.name} has neither a log nor a store to audit")
    run = place.run or _run_of(store, place.name)
    bus = None
    if place.bus is not None:
        bus = open_run_log(place)
        opened.callback(bus.close)
    return Audit(bus, store, run, audit_policy(place), progress)


def audit_policy(place: RunLocation) -> AuditPolicy:
    """Returns the settings of `config.json` that the audit needs; unknown ones are marked so."""
    configuration = place.configuration
    on_update = configuration.get("rollouts", {}).get("on_update")
    if on_update is None or "max_lag" not in configuration.get("dispatch", {}):
        return AuditPolicy(known=False)
    keep_version = on_update == "keep_version"
    trainer = configuration.get("trainer", {})
    return AuditPolicy(
        place.max_lag,
        keep_version,
        rule=_rule(trainer, place, keep_version),
        choose=trainer.get("choose", ""),
        checkpoint_every=configuration.get("checkpoints", {}).get("every", 0),
    )


def _rule(trainer: Mapping[str, Any], place: RunLocation, keep_version: bool) -> TrainingRule | None:
    """Returns the trainer's rule from its resolved settings; None if a setting is missing. If the
    model no longer exists, any token id is accepted.
    """
    settings = SimpleNamespace(**trainer)
    unknown = TrainingBounds()
    context_max = place.configuration.get("rollouts", {}).get("context_max", unknown.context_max)
    found = [v for p in place.tokenizers() if (v := hf_vocabulary_size(p.parent)) is not None]
    bounds = TrainingBounds(found[0] if found else unknown.vocabulary, context_max, keep_version)
    try:
        return training_rule(cast("TrainerSettings", settings), place.max_lag, keep_version, bounds)
    except AttributeError:
        return None


def _run_of(store: ObjectStore | None, name: str) -> str:
    """Returns the name of the archive's only run."""
    keys = [] if store is None else [parse_archive_key(e.key, e.bytes) for e in store.list(ARCHIVE_PREFIX)]
    runs = sorted({file.run for file in keys if file is not None})
    if len(runs) > 1:
        few = ", ".join(runs[:8])
        raise ConfigurationError(f"{name} holds {len(runs)} runs ({few}): name one with --name")
    if not runs:
        raise ConfigurationError(f"{name} holds no archive of a run; is the path right?")
    return runs[0]


def warn(text: str) -> None:
    """Print a message on stderr, apart from the report."""
    print(f"rollstream: {text}", file=sys.stderr)


def _progress_printer() -> Callable[[str], None]:
    """Returns a function that shows the topic being read on one terminal line, if there is one."""
    if not sys.stderr.isatty():
        return lambda text: None

    def show(text: str) -> None:
        shown = f"reading {text}" if text else ""
        print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)

    return show
