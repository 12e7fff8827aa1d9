"""The explorer towards the browser: `routes` maps paths to answers, for the `server` (with
`address`, `security` and `events`) and for the static `export`. `sql` answers free queries, which
`sql_process` runs; `process` runs the explorer beside a run.
"""
