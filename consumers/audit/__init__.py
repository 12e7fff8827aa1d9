"""The audit: what a run did, checked against the numbered invariants.

`audit` reads each topic once through `source` (log and archive) and applies the folds. `folds` has
their interface, the result of one invariant and an index of the ledger. One fold or more per
invariant: 1 `groups`, `decisions`, `trainer_reads` (open groups, by what the trainer had read at
each take); 2 `exactly_once`, `repetitions`, `surplus` (groups with redundancy); 3 to 5 `spans`,
`lags`, `origins`, `resume_chains`; `settings_since` (changed settings of prompts); 6 `versions`,
`store`; 7 `fences`; 11 `store`. `verdict` is what the next audit continues from, if by
`own_verdicts` this user wrote it. `report_json` prints the report
as JSON; docs/reference/audit.md explains it.
"""
