"""A run's live state, the metrics of a moment, the terminal view, the warnings. Nothing here writes
to the run.

`state` (with `groups`, `samples` and `sessions`) is the one bounded fold over a run's records that
`top`, report, warnings and `ls` share; `feed` reads log and metrics files into it. `snapshot`
computes the metrics of a moment, with `progress` and `rollouts`. The warnings (`warnings_flow`,
`warnings_processes`, `warnings_split`, `warnings_learning`) are functions of a snapshot, with
`machine_use`; `concerns` lists them; `failure_causes` classifies deaths of trajectories. `observer`
joins these steps. `rows`, `table` and `format` lay a snapshot out as text; `view` draws it.
"""
