"""`rollstream audit [RUN]`: what a run did, held to invariants 1 to 7 (docs/audit.md).

It only reads. Exit codes: 0 everything was checked and kept, 1 something is violated, 2 nothing is
violated but something could not be checked.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from consumers.audit.audit import Audit
from consumers.audit.lag import Policy
from consumers.trainer.prepare import Rule, rule_of
from rollstream.analysis.live import open_log
from rollstream.analysis.place import REPLAYED, Place, asked_place
from rollstream.audited import in_json, in_words
from rollstream.commands.pipes import ending_quietly
from storage.archive.names import PREFIX, parsed
from storage.checkpoint_folder import vocabulary_in
from storage.connect import open_store
from storage.objects import ObjectStore
from streams.admissible import TrainingBounds
from streams.errors import ConfigurationError, RollstreamError

if TYPE_CHECKING:  # pydantic takes longer to import than a small run to audit
    from consumers.settings import TrainerSettings

KEPT, VIOLATED, UNCHECKED = 0, 1, 2


@ending_quietly
def main(arguments: argparse.Namespace) -> int:
    """Print one line per invariant, with the first offenders."""
    place = asked_place(arguments.run, arguments.name, warn)
    if place.folder is not None and (place.folder / REPLAYED).is_file():
        raise ConfigurationError(f"{place.name} is a replay; audit the run that it is of")
    told = _told()
    try:
        with ExitStack() as opened:
            audit = _opened(place, told, opened)
            tallies = audit.check()
    except ConfigurationError:
        raise
    except RollstreamError as error:
        told("")
        warn(f"{place.name} could not be read to its end: {error}")
        return UNCHECKED
    told("")
    if arguments.json:
        print(json.dumps(in_json(place.name, audit.run, tallies, audit.coverage)))
    else:
        width = shutil.get_terminal_size().columns
        print("\n".join(in_words(place.name, audit.run, tallies, audit.coverage, width)))
    states = {tally.state for tally in tallies}
    if "violated" in states:
        return VIOLATED
    return UNCHECKED if "unchecked" in states else KEPT


def _opened(place: Place, told: Callable[[str], None], opened: ExitStack) -> Audit:
    """The audit of what is there: log, store, or both."""
    store = open_store(place.store) if place.has_store else None
    if store is None and place.bus is None:
        raise ConfigurationError(f"{place.name} has neither a log nor a store to audit")
    run = place.run or _run_of(store, place.name)
    bus = None
    if place.bus is not None:
        bus = open_log(place)
        opened.callback(bus.close)
    return Audit(bus, store, run, policy_of(place), told)


def policy_of(place: Place) -> Policy:
    """What the run's `config.json` says of lag, versions, closings and checkpoints."""
    configuration = place.configuration
    on_update = configuration.get("rollouts", {}).get("on_update")
    if on_update is None or "max_lag" not in configuration.get("dispatch", {}):
        return Policy(known=False)
    keep_version = on_update == "keep_version"
    trainer = configuration.get("trainer", {})
    return Policy(
        place.max_lag,
        keep_version,
        rule=_rule(trainer, place, keep_version),
        choose=trainer.get("choose", ""),
        checkpoint_every=configuration.get("checkpoints", {}).get("every", 0),
    )


def _rule(trainer: Mapping[str, Any], place: Place, keep_version: bool) -> Rule | None:
    """The trainer's, by its resolved settings; None where one of them is not there. Where the model
    is gone any token passes.
    """
    settings = SimpleNamespace(**trainer)
    unknown = TrainingBounds()
    context_max = place.configuration.get("rollouts", {}).get("context_max", unknown.context_max)
    found = [v for p in place.tokenizers() if (v := vocabulary_in(p.parent)) is not None]
    bounds = TrainingBounds(found[0] if found else unknown.vocabulary, context_max, keep_version)
    try:
        return rule_of(cast("TrainerSettings", settings), place.max_lag, keep_version, bounds)
    except AttributeError:
        return None


def _run_of(store: ObjectStore | None, name: str) -> str:
    """The only run of an archive."""
    keys = [] if store is None else [parsed(e.key, e.bytes) for e in store.list(PREFIX)]
    runs = sorted({file.run for file in keys if file is not None})
    if len(runs) > 1:
        few = ", ".join(runs[:8])
        raise ConfigurationError(f"{name} holds {len(runs)} runs ({few}): name one with --name")
    if not runs:
        raise ConfigurationError(f"{name} holds no archive of a run; is the path right?")
    return runs[0]


def warn(text: str) -> None:
    """To the person, apart from the report."""
    print(f"rollstream: {text}", file=sys.stderr)


def _told() -> Callable[[str], None]:
    """What is being read, on one line of a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda text: None

    def tell(text: str) -> None:
        shown = f"reading {text}" if text else ""
        print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)

    return tell
