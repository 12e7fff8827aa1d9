"""Speculative decoding with drafts from earlier answers to the same prompt
(docs/explanation/drafts.md).

`history` keeps answers in a ring with an n-gram `index`, in private or shared memory
(`shared_memory`). `node` shares one history
between the rollouts of a node, and `feed` fills it from the log. `speculation` makes and verifies
the drafts of an engine: `planner` estimates acceptance probabilities and chooses draft lengths, and
`gate` turns drafting on and off. `opening` puts together what one rollout drafts with.
"""
