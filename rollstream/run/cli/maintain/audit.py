"""`rollstream audit [RUN]`: checks invariants 1 to 7, and 11 for checkpoints
(docs/reference/audit.md), from the end of this user's last audit unless `--whole`.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from textwrap import fill

from rollstream.consumers.audit.audit import Audit, continued_audit, utc_minute
from rollstream.consumers.audit.folds import InvariantResult
from rollstream.consumers.audit.report_json import audit_report_json
from rollstream.errors import ConfigurationError, OutputLost, RollstreamError
from rollstream.look.index.audit_policy import audit_policy
from rollstream.look.query.locate import RunLocation, locate_asked_run
from rollstream.look.query.looking import open_run_view
from rollstream.run.cli.arguments import RUN_OR_ARCHIVE_HELP, CommandParser
from rollstream.run.signals import progress_line, warn
from rollstream.storage.identity import check_readable

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


def _indented(text: str, columns: int) -> Iterator[str]:
    if text:
        indent = " " * 4
        yield fill(text, columns, initial_indent=indent, subsequent_indent=indent + "  ")


def _verdict(audit: Audit, results: Sequence[InvariantResult]) -> str:
    """Names the checked parts, and nothing beyond them."""
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
    """One line per invariant, with its first violations."""
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


def _show_progress(text: str) -> None:
    progress_line(f"reading {text}" if text else "")
