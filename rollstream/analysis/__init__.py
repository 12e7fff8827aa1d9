"""Read-only analysis of a run: SQL over log and archive, conditions on records, the details of a
trajectory.

`locate` finds and opens a run's data. `session` runs SQL over the `views`; `base_views` join the
rows of `archive_files` and all others, which a `LogView` reads. `trajectory` gathers everything
about one trajectory, and has the `Run` that `rollstream.open_run` returns; `render` prints it.
`fields` parses conditions on records, `describe` and `output` format records and results.
"""
