"""From the log to samples, without torch, as the audit applies the same rules.

`groups` collects completions and annotations, `prepare` turns a group into samples by the
`training_rule`, with `advantages`, masked by their `lags`; `sample` is one of them, `ready_groups`
holds records and samples. `selection` chooses groups and packs micro-batches; recorded takes keep
`earlier_rules`. `poisoned_takes` gives up takes that no learner can compute. `rule_checks` tries a
user's rules; `metrics` are those of a step.
"""
