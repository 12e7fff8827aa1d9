"""What one of the trainer's processes is called, and with whom it ends."""

import os
from collections.abc import Mapping, MutableMapping

from rollstream.consumers.trainer.sharded.rank_environment import is_launched, rank_of
from rollstream.config.sources import METRICS_PORT
from rollstream.supervisor.lifeline import PARENT_VARIABLE as PARENT


def rank_name(name: str, environment: MutableMapping[str, str] = os.environ) -> str:
    """Rank 0 has the name, others one of their own, and a free port for their metrics."""
    rank = rank_of(environment)
    if not rank:
        return name
    environment[METRICS_PORT] = "0"
    return f"{name}-rank{rank}"


def rank_environment(environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """A rank that `torchrun` started ends with it; any other process with whom it was told."""
    if PARENT in environment or not is_launched(environment):
        return environment
    return {PARENT: str(os.getppid())}
