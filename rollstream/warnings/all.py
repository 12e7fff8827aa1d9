"""All warnings about a snapshot, the most severe kinds first. Pure."""

from rollstream.live.snapshot import Snapshot
from rollstream.warnings.concern import Concern
from rollstream.warnings.flow import PACE, STANDSTILL
from rollstream.warnings.learning import CHECKS as LEARNING_CHECKS
from rollstream.warnings.log import CHECKS as LOG_CHECKS
from rollstream.warnings.mismatch import CHECKS as MISMATCH_CHECKS

CHECKS = (*STANDSTILL, *LOG_CHECKS, *MISMATCH_CHECKS, *LEARNING_CHECKS, *PACE)
"""In this order: no progress, wrong data, nothing to learn from, avoidable slowness."""


def concerns_of(at: Snapshot) -> tuple[Concern, ...]:
    """Returns the warnings about a snapshot; an empty tuple for a healthy run."""
    return tuple(concern for check in CHECKS for concern in check(at))
