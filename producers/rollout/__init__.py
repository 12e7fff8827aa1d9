"""The rollout worker: assignments in, trajectories and partials out.

`worker` is the loop. `assignments` queues what dispatch assigns, `in_progress` holds the running
trajectories (`trajectory`), `chain` reads the partials of one that is resumed, `ended_turns` waits
for rewards and replies. `weights` fetches versions, `update_policy` decides when they are taken.
`publisher` writes all records, through the thread of `sender`; `heartbeat` sends the status.
`metrics` are the numbers that a rollout reports.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.rollout.assignments import AssignmentQueue
    from rollstream.producers.rollout.ended_turns import EndedTurns
    from rollstream.producers.rollout.heartbeat import Heartbeat, StatusSchedule
    from rollstream.producers.rollout.publisher import RolloutPublisher
    from rollstream.producers.rollout.sender import BackgroundSender, SynchronousSender
    from rollstream.producers.rollout.weights import WeightsFollower
    from rollstream.producers.rollout.worker import RolloutLoop

__all__ = [
    "AssignmentQueue",
    "BackgroundSender",
    "EndedTurns",
    "Heartbeat",
    "RolloutLoop",
    "RolloutPublisher",
    "StatusSchedule",
    "SynchronousSender",
    "WeightsFollower",
]

_MODULES = {
    "AssignmentQueue": "assignments",
    "BackgroundSender": "sender",
    "EndedTurns": "ended_turns",
    "Heartbeat": "heartbeat",
    "RolloutLoop": "worker",
    "RolloutPublisher": "publisher",
    "StatusSchedule": "heartbeat",
    "SynchronousSender": "sender",
    "WeightsFollower": "weights",
}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
