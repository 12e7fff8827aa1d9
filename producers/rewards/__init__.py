"""Rewards and environment replies, computed by a task's own code in separate processes.

`pool` is the interface: it queues questions and returns one outcome for each. `process` is the
program that runs in each process.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.producers.rewards.pool import (
        RewardOutcome as RewardOutcome,
        RewardPool as RewardPool,
        RewardVerdict as RewardVerdict,
    )

__getattr__ = lazy_exports(__name__)
