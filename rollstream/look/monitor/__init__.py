"""Monitoring of a run: its live state, the metrics of a moment, the terminal view, the warnings.

`state` holds the `RunState` (with `groups`, `samples` and `sessions`), the one bounded fold over a
run's records that `top`, report, warnings and `ls` share; `feed` reads log and metrics files into
it. `snapshot` computes the metrics of a moment, with `progress` and `rollouts`. The warnings
(`warnings_flow`, `warnings_processes`, `warnings_split`, `warnings_learning`) are functions of a
snapshot, `machine_use` tells them how busy the cores are; `concerns` lists them, with the metric,
the alert and the runbook entry of each; `failure_causes` classifies why trajectories died.
`observer` joins these steps. `rows`, `table` and `format`
lay a snapshot out as text; `view` draws it. Nothing here writes to the run.
"""
