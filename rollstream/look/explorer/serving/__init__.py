"""The explorer towards the browser: `routes` maps paths to answers, for the `server` (with
`address`, `security` and `events`) for the static `export`,
and for `report_file`, which writes `report.html`. `sql` answers free queries, which
`sql_process` runs; `process` runs the explorer beside a run.
"""
