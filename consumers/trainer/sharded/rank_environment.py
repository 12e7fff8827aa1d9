"""Reads this process's rank from the environment variables of `torchrun`, which the supervisor sets
as well.
"""

import os
from collections.abc import Mapping

from rollstream.errors import ConfigurationError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank; `ConfigurationError` if some of the variables are missing."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return False
    missing = [name for name in VARIABLES if not environment.get(name)]
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} must be set where RANK or WORLD_SIZE is: start the trainer's "
            "processes with `torchrun --nproc-per-node N -m -- rollstream train CONFIG`, or unset "
            "both"
        )
    return True


def rank_of(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank; 0 if there is only one process."""
    return int(environment["RANK"]) if is_launched(environment) else 0
