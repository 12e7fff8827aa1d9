"""Hostile runs: what a stranger may put into a run's folder, an archive, a backup, a broker or a
store, and a harness that runs every looking command on them.

`scene` is the user's machine around a received run, `cases` the hostile runs, `calls` the commands,
`trial` runs one call on one case and lists the harm. `python -m testbed.hostile_runs --help`.
"""
