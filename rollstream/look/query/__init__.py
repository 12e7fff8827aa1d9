"""Read-only analysis of a run: SQL over log and archive, conditions on records, the details of a
trajectory.

`locate` finds a run's data and `looking` opens them, as `permissions` and `own_runs` allow for
another user's run. `session` runs SQL over the `views` (with `fate_views`), in calls that Ctrl-C
ends (`duckdb_calls`); `base_views` join the rows of `archive_files` and of the log; `confinement`
keeps a query inside its run. `trajectory` gathers everything about one, and has the `Run` that
`rollstream.open_run` returns. `paired_runs` compares two runs by prompts, with the tests of
`intervals`, `sigmoid_fit` fits reward curves. `token_scores` keeps the trainer's scores beside a
run. `fields` parses conditions on records, `describe` and `output` format records and results,
`record_times` bounds their times.
"""
