"""Speculative decoding with drafts from earlier answers to the same prompt
(docs/explanation/drafts.md).

`source` is the contract of a draft source. `history` keeps answers in a ring with an n-gram
`index`, in private or shared memory (`shared_memory`); `node` shares one history between the
rollouts of a node, and `feed` fills it from the log. `speculation` makes and verifies the drafts of
an engine: `acceptance` estimates acceptance probabilities, `planner` chooses draft lengths, and
`gate` turns drafting on and off.
"""
