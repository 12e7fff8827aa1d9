"""Training on recorded trajectories, and copies of a run's records.

`recorded_steps` reads the steps of a run's ledger and their micro-batches, or plans steps over the
log into which `offline_log` gathers trajectories of several sources, JSON lines among them.
`training` trains the steps into a store and a log of their own. `topic_copy` copies topics to
another bus. `token_scores` scores the tokens of trajectories again. `training` and `token_scores`
import torch.
"""
