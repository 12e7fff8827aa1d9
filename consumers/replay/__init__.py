"""Training on recorded trajectories, and copies of a run's records.

`recorded_steps` reads the steps of a run's ledger and their micro-batches, `training` trains them
again into a store and a log of their own. `topic_copy` copies topics to another bus. For offline
training, `jsonl` reads trajectories of other programs, `offline_log` merges the trajectories of
several sources into one log, and `offline_steps` plans steps over it.

`training` imports torch.
"""
