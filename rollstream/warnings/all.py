"""Every warning of a moment, the gravest kinds first: pure functions over its figures."""

from rollstream.live.snapshot import Snapshot
from rollstream.warnings import flow, learning, log, mismatch
from rollstream.warnings.concern import Concern

CHECKS = (*flow.STANDSTILL, *log.CHECKS, *mismatch.CHECKS, *learning.CHECKS, *flow.PACE)
"""What stands still, what is wrong, what is not learnt from, what could be faster."""


def concerns_of(at: Snapshot) -> tuple[Concern, ...]:
    """None for a run that is well."""
    return tuple(concern for check in CHECKS for concern in check(at))
