"""The trainer role: takes complete groups from the log, trains them, and publishes versions.

In the order of a step: `build` restores checkpoint and ledger, `loop` runs the phases, `data/`
selects and prepares samples, `learn/` computes gradients and updates, `takes` records what is
trained, `publisher` publishes steps through `versions`, `checkpoint` and `ledger`; `totals` sums
them for the metrics. `retention` pins versions and truncates topics, `past_versions` reads versions
for the loss. `sharded/` is a learner of several processes, among which `rank_plan` divides work and
tensors. Most modules import torch.
"""
