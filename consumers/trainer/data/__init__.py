"""From the log to samples, and the records that the trainer still needs.

`groups` collects completions and annotations by group, `prepare` turns a group into samples with
advantages, masked by lag, `sample` is one of them. `selection` chooses groups and packs samples
into micro-batches, `takes` records them in the ledger and submits them to the learner.
`poisoned_takes` gives up takes that no learner can compute. `retention` pins versions, truncates
topics and reads truncated records from the archive.

`takes` imports torch; the audit, which imports other modules of this package, must not.
"""
