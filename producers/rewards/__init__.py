"""Rewards and environment replies, computed by a task's own code in separate processes.

`pool` is the interface: it queues questions and returns one outcome for each. `process` is the
program that runs in each process, and `worker` starts and ends it. The replies of an environment
with an `async def reply` come from the program `environment`, one process for all, which `replies`
asks.
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
