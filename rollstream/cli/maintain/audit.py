"""`rollstream audit [RUN]`: checks invariants 1 to 7, and 11 for checkpoints
(docs/reference/audit.md), from the end of this user's last audit unless `--whole`. Exit codes: 0
all hold; 1 one is violated, and nothing else; 2 none is, but parts could not be checked or read.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from textwrap import fill
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from rollstream.analysis.locate import RunLocation, locate_asked_run
from rollstream.analysis.looking import (
    model_file,
    open_run_view,
    refused_code,
    trainer_settings,
)
from rollstream.cli.arguments import RUN_OR_ARCHIVE_HELP, CommandParser
from rollstream.cli.signals import progress_line, warn
from rollstream.consumers.audit.audit import Audit, continued_audit, utc_minute
from rollstream.consumers.audit.folds import InvariantResult, Offender
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.trainer.data.prepare import (
    LATER_SETTINGS,
    TrainingRule,
    training_rule,
)
from rollstream.errors import ConfigurationError, OutputLost, RollstreamError, StoreError
from rollstream.storage.hf_folder import CONFIG, vocabulary_size
from rollstream.storage.identity import check_readable
from rollstream.storage.stored_settings import CONFIGURATION_KEY, recorded_settings
from rollstream.streams.admissible import TrainingBounds

if TYPE_CHECKING:
    from rollstream.consumers.settings import TrainerSettings
    from rollstream.storage.stores.base import ObjectStore

# Exit codes.
KEPT, VIOLATED, UNCHECKED = 0, 1, 2
STATE_MARKS = {"kept": "✓", "violated": "✗", "unchecked": "?"}
COLUMNS_MAX = 120


def audit_report_lines(
    name: str,
    audit: Audit,
    results: Sequence[InvariantResult],
    columns: int,
) -> Iterator[str]:
    columns = min(columns, COLUMNS_MAX)
    missing = [topic for topic, complete in audit.coverage.items() if complete == "absent"]
    absent = f"; missing: {', '.join(missing)}" if missing else ""
    yield fill(f"{name}, run {audit.run}{absent}", columns, subsequent_indent="  ")
    for result in results:
        number = str(result.number) if result.number else "–"
        yield f"{STATE_MARKS[result.state]} {number} {result.title}"
        counts = ", ".join(f"{count:,} {what}" for what, count in result.counts.items())
        yield from _indented(counts, columns)
        for offender in result.offenders:
            yield from _indented(f"✗ {offender.where}: {offender.what}", columns)
        if result.violations > len(result.offenders):
            yield from _indented(f"and {result.violations - len(result.offenders):,} more", columns)
        for what in result.unchecked:
            yield from _indented(f"? not checked: {what}", columns)
        for note in result.notes:
            yield from _indented(f"· {note}", columns)
    yield fill(_verdict(audit, results), columns, subsequent_indent="  ")


def audit_report_json(
    name: str, audit: Audit, results: Sequence[InvariantResult]
) -> dict[str, Any]:
    """Returns the report as a JSON object. `since_s` is the time of the audit from which this one
    continued; `copies_verified` is False if archived copies of records in the log were not
    verified.
    """
    return {
        "place": name,
        "run": audit.run,
        "violations": sum(result.violations for result in results),
        "checked_whole": not any(result.unchecked for result in results),
        "since_s": audit.since_s,
        "copies_verified": not audit.skipped_copies,
        "topics": dict(audit.coverage),
        "invariants": [_invariant_json(result) for result in results],
    }


def _invariant_json(result: InvariantResult) -> dict[str, Any]:
    return {
        "invariant": result.number,
        "title": result.title,
        "state": result.state,
        "counts": dict(result.counts),
        "violations": result.violations,
        "offenders": [_offender_json(offender) for offender in result.offenders],
        "unchecked": result.unchecked,
        "notes": result.notes,
    }


def _offender_json(offender: Offender) -> dict[str, Any]:
    place: dict[str, Any] = {"key": offender.key} if offender.key else {"topic": offender.topic}
    if offender.at is not None:
        place |= {"partition": offender.at.partition, "offset": offender.at.offset}
    return {"what": offender.what, **place}


def _indented(text: str, columns: int) -> Iterator[str]:
    if text:
        indent = " " * 4
        yield fill(text, columns, initial_indent=indent, subsequent_indent=indent + "  ")


def _verdict(audit: Audit, results: Sequence[InvariantResult]) -> str:
    """Returns the sentence that names the checked parts, and nothing beyond them."""
    violations = sum(result.violations for result in results)
    unchecked = sum(len(result.unchecked) for result in results)
    if violations:
        return f"violated: {violations:,} times"
    if audit.since_s is not None:
        since = f"since the last audit at {utc_minute(audit.since_s)}, of this machine"
        failed = f"; {unchecked} checks were not possible" if unchecked else ""
        return f"nothing is violated {since}{failed}; --whole reads what is older again"
    if unchecked:
        return f"nothing is violated; {unchecked} checks were not possible"
    if audit.skipped_copies:
        return (
            "every record was checked, nothing is violated; --whole also verifies the archived "
            "copies of records that the log has"
        )
    return "everything was checked, nothing is violated"


def add_arguments(command: CommandParser) -> None:
    command.add_examples("runs/quickstart-0", "runs/quickstart-0 --whole --json")
    command.add_run(RUN_OR_ARCHIVE_HELP)
    command.add_archive_run()
    help = "start at the first record, not where the last audit of the run ended, and verify all "
    help += "archived files, also those whose records the log still has"
    command.add_argument("--whole", action="store_true", help=help)
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Print one line per invariant, with its first violations, and return the exit code."""
    name = "the run"
    try:
        location = locate_asked_run(arguments.run, arguments.name, warn, arguments.is_trusted)
        name = location.name
        return _audited(location, arguments)
    except (ConfigurationError, OutputLost):
        raise
    except RollstreamError as error:
        trouble = str(error)
    except Exception as error:  # noqa: BLE001  a traceback would end with 1, "violated"
        trouble = f"{type(error).__name__}: {error}"
    progress_line("")
    warn(f"{name} could not be read to its end, so nothing is known of it: {trouble}")
    return UNCHECKED


def _audited(location: RunLocation, arguments: argparse.Namespace) -> int:
    if location.is_replay:
        raise ConfigurationError(f"{location.name} is a replay; audit the replayed run instead")
    with ExitStack() as opened:
        audit, results = continued_audit(
            lambda: _opened(location, opened), arguments.whole, location.store
        )
    progress_line("")
    if arguments.json:
        print(json.dumps(audit_report_json(location.name, audit, results)))
    else:
        width = shutil.get_terminal_size().columns
        print("\n".join(audit_report_lines(location.name, audit, results, width)))
    states = {result.state for result in results}
    if "violated" in states:
        return VIOLATED
    return UNCHECKED if "unchecked" in states else KEPT


def _opened(location: RunLocation, opened: ExitStack) -> Audit:
    if not location.has_store and location.bus is None:
        raise ConfigurationError(f"{location.name} has neither a log nor a store to audit")
    view = opened.enter_context(open_run_view(location))
    if view.store is not None:
        check_readable(view.store)
    return Audit(view.bus, view.store, view.run, audit_policy(location, view.store), _show_progress)


def audit_policy(location: RunLocation, store: "ObjectStore | None" = None) -> AuditPolicy:
    """Returns the settings of `config.json` that the audit needs; `known` is False if that file
    lacks them.
    """
    on_update = location.table("rollouts").get("on_update")
    if on_update is None or "max_lag" not in location.table("dispatch"):
        return AuditPolicy(known=False)
    keep_version = on_update == "keep_version"
    trainer = trainer_settings(location)
    return AuditPolicy(
        location.max_lag,
        keep_version,
        rule=_rule(trainer, location, keep_version),
        refused=refused_code(location),
        choose=trainer.get("choose", ""),
        checkpoint_every=location.table("checkpoints").get("every", 0),
        epochs=trainer.get("epochs", 1),
        max_lags={} if store is None else _max_lags(store),
    )


def _max_lags(store: "ObjectStore") -> dict[str, int | None]:
    bounds: dict[str, int | None] = {}
    for entry in store.list("configurations/"):
        digest = entry.key.removeprefix("configurations/").removesuffix(".json")
        if not CONFIGURATION_KEY.fullmatch(entry.key):
            continue
        try:
            bound = recorded_settings(store, digest).get("dispatch.max_lag", 0)
        except StoreError as error:
            warn(f"{entry.key} cannot be read: {error}")
            continue
        if bound is None or isinstance(bound, int):
            bounds[digest] = bound
    return bounds


def _rule(
    trainer: Mapping[str, Any], location: RunLocation, keep_version: bool
) -> TrainingRule | None:
    """Returns the trainer's rule for which samples are trained; None if a setting is missing that
    the run's release had (`LATER_SETTINGS`).
    """
    settings = SimpleNamespace(**{**LATER_SETTINGS, **trainer})
    unknown = TrainingBounds()
    context_max = location.table("rollouts").get("context_max", unknown.context_max)
    content = model_file(location, CONFIG) if trainer else None
    vocabulary = None if content is None else vocabulary_size(content)
    # Without the model's folder any token id is accepted.
    bounds = TrainingBounds(vocabulary or unknown.vocabulary, context_max, keep_version)
    try:
        return training_rule(
            cast("TrainerSettings", settings), location.max_lag, keep_version, bounds
        )
    except AttributeError:
        return None


def _show_progress(text: str) -> None:
    progress_line(f"reading {text}" if text else "")
