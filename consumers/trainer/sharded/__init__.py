"""A learner of several processes (ranks) that share one model by FSDP2
(docs/how-to/several-gpus.md).

Rank 0 is the trainer. Every other rank is a `follower`: it reads the ledger and runs the same loop,
so that all call the `learner` in the same order. A `shard` is a rank's part of the
`starting_model`, which `shard_optimiser` updates. `tensors` has the collectives over it,
and `rank_writing` writes versions and checkpoints from all ranks. `ranks` joins the processes.

Most modules import torch.
"""
