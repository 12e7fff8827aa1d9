"""`rollstream audit [RUN]`: checks a run against invariants 1 to 7, and 11 for its checkpoints
(docs/reference/audit.md).

An audit starts where the run's last audit ended, unless `--whole` is given. Exit codes: 0 all
invariants hold, 1 at least one is violated, 2 none is violated but parts of the run could not be
checked, or the run could not be read to its end.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from textwrap import fill
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from rollstream.analysis.locate import REPLAY_FILE, RunLocation, locate_asked_run, open_run_view
from rollstream.cli.arguments import RUN_OR_ARCHIVE_HELP, CommandParser
from rollstream.cli.signals import progress_line, quiet_on_closed_pipe, warn
from rollstream.config.identity import check_readable
from rollstream.consumers.audit.audit import Audit, continued_audit
from rollstream.consumers.audit.folds import Completeness, InvariantResult, Offender
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.trainer.data.prepare import (
    LATER_SETTINGS,
    TrainingRule,
    training_rule,
)
from rollstream.errors import ConfigurationError, RollstreamError
from rollstream.storage.hf_folder import hf_vocabulary_size
from rollstream.streams.admissible import TrainingBounds

if TYPE_CHECKING:
    from rollstream.consumers.settings import TrainerSettings

KEPT, VIOLATED, UNCHECKED = 0, 1, 2
"""Exit codes."""
STATE_MARKS = {"kept": "✓", "violated": "✗", "unchecked": "?"}
COLUMNS_MAX = 120


def audit_report_lines(
    name: str,
    run: str,
    results: Sequence[InvariantResult],
    coverage: Mapping[str, Completeness],
    columns: int,
) -> Iterator[str]:
    """Yields the lines of the text report. `coverage` holds how complete each topic was."""
    columns = min(columns, COLUMNS_MAX)
    missing = [topic for topic, complete in coverage.items() if complete == "absent"]
    absent = f"; missing: {', '.join(missing)}" if missing else ""
    yield fill(f"{name}, run {run}{absent}", columns, subsequent_indent="  ")
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
    yield _verdict(results)


def audit_report_json(
    name: str, run: str, results: Sequence[InvariantResult], coverage: Mapping[str, Completeness]
) -> dict[str, Any]:
    """Returns the report as a JSON object."""
    return {
        "place": name,
        "run": run,
        "violations": sum(result.violations for result in results),
        "checked_whole": not any(result.unchecked for result in results),
        "topics": dict(coverage),
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


def _verdict(results: Sequence[InvariantResult]) -> str:
    violations = sum(result.violations for result in results)
    unchecked = sum(len(result.unchecked) for result in results)
    if violations:
        return f"violated: {violations:,} times"
    if unchecked:
        return f"nothing is violated; {unchecked} checks were not possible"
    return "everything was checked, nothing is violated"


def add_arguments(command: CommandParser) -> None:
    command.add_examples("runs/quickstart-0", "runs/quickstart-0 --whole --json")
    command.add_run(RUN_OR_ARCHIVE_HELP)
    command.add_archive_run()
    whole = "start at the first record, not where the last audit of the run ended, and verify all "
    whole += "archived files, also those whose records the log still has"
    command.add_argument("--whole", action="store_true", help=whole)
    command.add_json()


@quiet_on_closed_pipe
def main(arguments: argparse.Namespace) -> int:
    """Print one line per invariant, with its first violations, and return the exit code."""
    location = locate_asked_run(arguments.run, arguments.name, warn)
    if location.folder is not None and (location.folder / REPLAY_FILE).is_file():
        raise ConfigurationError(f"{location.name} is a replay; audit the replayed run instead")
    try:
        with ExitStack() as opened:
            audit, results = continued_audit(lambda: _opened(location, opened), arguments.whole)
    except ConfigurationError:
        raise
    except RollstreamError as error:
        progress_line("")
        warn(f"{location.name} could not be read to its end: {error}")
        return UNCHECKED
    progress_line("")
    if arguments.json:
        print(json.dumps(audit_report_json(location.name, audit.run, results, audit.coverage)))
    else:
        width = shutil.get_terminal_size().columns
        print(
            "\n".join(audit_report_lines(location.name, audit.run, results, audit.coverage, width))
        )
    states = {result.state for result in results}
    if "violated" in states:
        return VIOLATED
    return UNCHECKED if "unchecked" in states else KEPT


def _opened(location: RunLocation, opened: ExitStack) -> Audit:
    """Returns the audit of the run's log, its store, or both."""
    if not location.has_store and location.bus is None:
        raise ConfigurationError(f"{location.name} has neither a log nor a store to audit")
    view = opened.enter_context(open_run_view(location))
    if view.store is not None:
        check_readable(view.store)
    return Audit(view.bus, view.store, view.run, audit_policy(location), _show_progress)


def audit_policy(location: RunLocation) -> AuditPolicy:
    """Returns the settings of `config.json` that the audit needs; `known` is False if that file
    lacks them.
    """
    configuration = location.configuration
    on_update = configuration.get("rollouts", {}).get("on_update")
    if on_update is None or "max_lag" not in configuration.get("dispatch", {}):
        return AuditPolicy(known=False)
    keep_version = on_update == "keep_version"
    trainer = configuration.get("trainer", {})
    return AuditPolicy(
        location.max_lag,
        keep_version,
        rule=_rule(trainer, location, keep_version),
        choose=trainer.get("choose", ""),
        checkpoint_every=configuration.get("checkpoints", {}).get("every", 0),
        epochs=trainer.get("epochs", 1),
    )


def _rule(
    trainer: Mapping[str, Any], location: RunLocation, keep_version: bool
) -> TrainingRule | None:
    """Returns the trainer's rule for which samples of a group are trained, from its recorded
    settings; None if one is missing, unless the run's release did not have it yet
    (`LATER_SETTINGS`). If no vocabulary size is found, because the model's folder no longer exists,
    any token id is accepted.
    """
    settings = SimpleNamespace(**{**LATER_SETTINGS, **trainer})
    unknown = TrainingBounds()
    context_max = location.configuration.get("rollouts", {}).get("context_max", unknown.context_max)
    found = [v for p in location.tokenizers() if (v := hf_vocabulary_size(p.parent)) is not None]
    bounds = TrainingBounds(found[0] if found else unknown.vocabulary, context_max, keep_version)
    try:
        return training_rule(
            cast("TrainerSettings", settings), location.max_lag, keep_version, bounds
        )
    except AttributeError:
        return None


def _show_progress(text: str) -> None:
    """Show the topic that is being read, on one terminal line."""
    progress_line(f"reading {text}" if text else "")
