"""A learner of several processes (ranks) that share one model by FSDP2
(docs/how-to/several-gpus.md).

Rank 0 is the trainer. Its `learner` sends `commands` (their values are in `messages`) to the other
ranks, each of which executes them in `follower`. A `shard` is a rank's part of the model, `tensors`
has the collectives over it, `rank_plan` reads a process's rank and divides work and tensors, and
`rank_writing` writes versions and checkpoints from all ranks. `ranks` joins the processes.

Most modules import torch.
"""
