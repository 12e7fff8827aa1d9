"""The rollout worker: assignments in, trajectories and partials out.

`worker` is the loop. `assignments` queues what dispatch assigns and decides when new weights are
taken, `tail_filling` decides what starts beside the last long answers. `in_progress` holds the
running trajectories (`trajectory`), `chain` reads the partials of one that is resumed,
`ended_turns` waits for rewards and replies. `weights` fetches versions, `read_back` compares the
served tensors. `publisher` writes all records in a thread of its own, `heartbeat` sends the status,
`loop_metrics` collects the metrics.
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
    from rollstream.producers.rollout.publisher import (
        BackgroundSender as BackgroundSender,
        RolloutPublisher as RolloutPublisher,
    )
    from rollstream.producers.rollout.weights import WeightsFollower as WeightsFollower
    from rollstream.producers.rollout.worker import RolloutLoop as RolloutLoop

__getattr__ = lazy_exports(__name__)
