"""From the log to samples, and the records that the trainer still needs.

`groups` collects completions and annotations by group, `prepare` turns a group into samples with
advantages, masked by lag, `sample` is one of them, `credit` has rewards of its turns or tokens,
`ready_groups` holds records and samples.
`selection` chooses groups and packs samples into micro-batches, `takes` records them in the ledger
and submits them to the learner, those of an earlier configuration by its choices
(`earlier_rules`). `poisoned_takes` gives up takes that no learner can compute.
`retention` pins versions, truncates topics and reads truncated records from the archive.
`rule_checks` tries a user's advantage or rule of choice.

`takes` imports torch; the audit, which imports other modules of this package, must not.
"""
