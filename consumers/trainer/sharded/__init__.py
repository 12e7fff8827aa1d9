"""A learner of several processes (ranks) that share one model by FSDP2
(docs/how-to/several-gpus.md).

Rank 0 is the trainer; every other one is a `follower`, which reads the ledger and calls the
`learner` in the same order. A `shard` is a rank's part of the `starting_model`, which
`shard_optimiser` updates; `tensors` has the collectives over it, `rank_writing` writes versions and
checkpoints, `ranks` joins the processes.
"""
