"""An audit's report as text and as JSON: for each invariant its state, counts and violations."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

from rollstream.consumers.audit.seen import Completeness
from rollstream.consumers.audit.tally import Offender, InvariantResult

STATE_MARKS = {"kept": "✓", "violated": "✗", "unchecked": "?"}
COLUMNS_MAX = 120


def audit_report_lines(
    name: str, run: str, tallies: Sequence[InvariantResult], coverage: Mapping[str, Completeness], columns: int
) -> Iterator[str]:
    """The text report, line by line."""
    columns = min(columns, COLUMNS_MAX)
    missing = [topic for topic, kept in coverage.items() if kept == "absent"]
    absent = f"; missing: {', '.join(missing)}" if missing else ""
    yield fill(f"{name}, run {run}{absent}", columns, subsequent_indent="  ")
    for tally in tallies:
        number = str(tally.number) if tally.number else "–"
        yield f"{STATE_MARKS[tally.state]} {number} {tally.title}"
        counts = ", ".join(f"{count:,} {what}" for what, count in tally.counts.items())
        yield from _indented(counts, columns)
        for offender in tally.offenders:
            yield from _indented(f"✗ {offender.where}: {offender.what}", columns)
        if tally.violations > len(tally.offenders):
            yield from _indented(f"and {tally.violations - len(tally.offenders):,} more", columns)
        for what in tally.unchecked:
            yield from _indented(f"? not checked: {what}", columns)
        for note in tally.notes:
            yield from _indented(f"· {note}", columns)
    yield _verdict(tallies)


def audit_report_json(
    name: str, run: str, tallies: Sequence[InvariantResult], coverage: Mapping[str, Completeness]
) -> dict[str, Any]:
    """The report as a JSON object."""
    return {
        "place": name,
        "run": run,
        "violations": sum(tally.violations for tally in tallies),
        "checked_whole": not any(tally.unchecked for tally in tallies),
        "topics": dict(coverage),
        "invariants": [_invariant_json(tally) for tally in tallies],
    }


def _invariant_json(tally: InvariantResult) -> dict[str, Any]:
    return {
        "invariant": tally.number,
        "title": tally.title,
        "state": tally.state,
        "counts": dict(tally.counts),
        "violations": tally.violations,
        "offenders": [_offender_json(offender) for offender in tally.offenders],
        "unchecked": tally.unchecked,
        "notes": tally.notes,
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


def _verdict(tallies: Sequence[InvariantResult]) -> str:
    violations = sum(tally.violations for tally in tallies)
    unchecked = sum(len(tally.unchecked) for tally in tallies)
    if violations:
        return f"violated: {violations:,} times"
    if unchecked:
        return f"nothing is violated; {unchecked} checks were not possible"
    return "everything was checked, nothing is violated"
