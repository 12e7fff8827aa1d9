"""An audit's report as a JSON object."""

from collections.abc import Sequence
from typing import Any

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.folds import InvariantResult, Offender


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
