"""From the log to samples, without torch, as the audit applies the same rules.

`groups` collects completions and annotations by group (`recorded_groups`: those that a take names),
`prepare` turns a group into samples by the `training_rule`, with `advantages`, masked by their
`lags`; `sample` is one of them, `ready_groups` holds records and samples. `selection` chooses
groups and packs samples into micro-batches; those of an earlier configuration are chosen by its
rules (`earlier_rules`). `poisoned_takes` gives up takes that no learner can compute. `rule_checks`
tries a user's advantage or rule of choice; `metrics` are those of a step.

Nothing here imports torch: the audit, which applies the same rules, must not.
"""
