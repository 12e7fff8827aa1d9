"""`rollstream replay`: makes something from recorded trajectories (docs/reference/replay.md).

Four kinds, each with its `main`: `repetition` trains the steps of a run's ledger again,
`publishing` copies records to another bus by `topic_copy`, `offline` trains on trajectories alone,
which `gathering` merges from several sources and `offline_plan` divides into steps, and
`token_scores` scores recorded tokens.

`recorded_steps` reads the steps of a ledger and `training` trains steps into a folder of their own,
whose request and lock are in `folder`, beside the input's opening. `conditions` are those of
`--where`; `behaviour` computes log-probabilities that a source lacks.
"""
