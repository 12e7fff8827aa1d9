"""The trainer role: takes complete groups from the log, trains them, and publishes versions.

The modules in the order of a step: `build` restores the newest checkpoint and the ledger behind it,
`loop` runs the phases of each step, `data/` selects and prepares the samples, `learn/` computes
gradients and updates, `publisher` publishes finished steps in a thread of its own through
`versions`, `checkpoint` and `ledger`; `totals` sums them for the metrics. `takes` records what is
trained in the ledger and submits it to the learner. `retention` pins versions, truncates topics and
reads truncated records from the archive; `deletions` is the thread that deletes. `past_versions`
reads versions for the loss. `sharded/` is a learner of several processes, among which `rank_plan`
divides work and tensors.

Most modules import torch.
"""
