"""Read-only analysis of a run: SQL over log and archive, conditions on records, the details of a
trajectory.

`locate` finds a run's data and `looking` opens them, as `permissions` and `own_runs` allow for a
run that may come from another user. `session` runs SQL over the `views`, some of which are in
`fate_views`, in calls that Ctrl-C ends (`duckdb_calls`); `base_views` join the rows of
`archive_files` and all others, which a `LogView` reads.
`trajectory` gathers everything about one trajectory, and has the `Run` that `rollstream.open_run`
returns. `confinement` keeps a query inside of its run. `paired_runs` compares two runs by prompts,
with the tests of `intervals`, `sigmoid_fit` fits reward curves. `token_scores` keeps the trainer's
scores of tokens beside a run.
`fields` parses conditions on records, `describe` and `output` format records and results,
`record_times` bounds their times.
"""
