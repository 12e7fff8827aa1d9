"""Rewards and environment replies, computed by a task's own code in separate processes.

`pool` is the interface: it queues questions and returns one outcome for each. `worker` is the
parent's end of one process, `process` the program that runs in it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.rewards.pool import RewardOutcome, RewardPool, RewardVerdict

__all__ = ["RewardOutcome", "RewardPool", "RewardVerdict"]

_MODULES = {"RewardOutcome": "pool", "RewardPool": "pool", "RewardVerdict": "pool"}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
