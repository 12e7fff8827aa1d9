"""`rollstream fork` and the four kinds of `rollstream replay`, which `replay` selects: `steps`
repeats training steps or copies records to another bus, `offline` trains on recorded trajectories,
`token_scores` scores their tokens.
"""
