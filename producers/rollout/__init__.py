"""The rollout worker: assignments in, trajectories and partials out.

`worker` is the loop. `assignments` queues what dispatch assigns, `in_progress` holds the running
trajectories (`trajectory`), `chain` reads the partials of one that is resumed, `ended_turns` waits
for rewards and replies. `weights` fetches versions, `update_policy` decides when they are taken.
`publisher` writes all records, through the thread of `sender`; `heartbeat` sends the status.
`metrics` are the numbers that a rollout reports.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.producers.rollout.assignments import AssignmentQueue as AssignmentQueue
    from rollstream.producers.rollout.ended_turns import EndedTurns as EndedTurns
    from rollstream.producers.rollout.heartbeat import (
        Heartbeat as Heartbeat,
        StatusSchedule as StatusSchedule,
    )
    from rollstream.producers.rollout.publisher import RolloutPublisher as RolloutPublisher
    from rollstream.producers.rollout.sender import (
        BackgroundSender as BackgroundSender,
    )
    from rollstream.producers.rollout.weights import WeightsFollower as WeightsFollower
    from rollstream.producers.rollout.worker import RolloutLoop as RolloutLoop

__getattr__ = lazy_exports(
    __name__,
    {
        "assignments": ("AssignmentQueue",),
        "ended_turns": ("EndedTurns",),
        "heartbeat": ("Heartbeat", "StatusSchedule"),
        "publisher": ("RolloutPublisher",),
        "sender": ("BackgroundSender",),
        "weights": ("WeightsFollower",),
        "worker": ("RolloutLoop",),
    },
)
