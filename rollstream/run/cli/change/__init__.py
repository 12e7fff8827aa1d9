"""`rollstream fork` and the four kinds of `rollstream replay` (docs/reference/fork.md,
docs/reference/replay.md).

`replay` selects the kind: `steps` repeats training steps or copies records to another bus,
`offline` trains on recorded trajectories, `token_scores` scores their tokens.
"""
