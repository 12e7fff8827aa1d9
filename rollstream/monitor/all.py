"""All warnings about a snapshot, the most severe kinds first. Pure."""

from rollstream.monitor.snapshot import RunSnapshot
from rollstream.monitor.concern import RunWarning
from rollstream.monitor.warnings_flow import PACE_CHECKS, STANDSTILL_CHECKS
from rollstream.monitor.warnings_learning import LEARNING_CHECKS
from rollstream.monitor.log import LOG_CHECKS
from rollstream.monitor.warnings_log import MISMATCH_CHECKS

ALL_CHECKS = (*STANDSTILL_CHECKS, *LOG_CHECKS, *MISMATCH_CHECKS, *LEARNING_CHECKS, *PACE_CHECKS)
"""In this order: no progress, wrong data, nothing to learn from, avoidable slowness."""


def warnings_of(at: RunSnapshot) -> tuple[RunWarning, ...]:
    """Returns the warnings about a snapshot; an empty tuple for a healthy run."""
    return tuple(concern for check in ALL_CHECKS for concern in check(at))
