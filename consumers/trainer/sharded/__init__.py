"""A learner of several processes (ranks) that share one model by FSDP2
(docs/how-to/several-gpus.md).

Rank 0 is the trainer. Every other rank is a `follower`: it reads the ledger and runs the same loop,
so that all call the `learner` in the same order. A `shard` is a rank's part of the
`starting_model`, which `shard_optimiser` updates. `tensors` has the collectives over it,
`rank_plan` reads a process's rank and divides work and tensors, and `rank_writing` writes versions
and checkpoints from all ranks. `ranks` joins the processes.

Most modules import torch.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.consumers.trainer.sharded.follower import build_follower as build_follower
    from rollstream.consumers.trainer.sharded.learner import (
        ShardedLearner as ShardedLearner,
        ShardedModel as ShardedModel,
    )
    from rollstream.consumers.trainer.sharded.rank_plan import (
        RankTurn as RankTurn,
        is_launched as is_launched,
        owners as owners,
        rank_of as rank_of,
        rounds as rounds,
    )
    from rollstream.consumers.trainer.sharded.ranks import (
        RankLost as RankLost,
        Ranks as Ranks,
        join_ranks as join_ranks,
    )
    from rollstream.consumers.trainer.sharded.shard import Shard as Shard

__getattr__ = lazy_exports(__name__)
