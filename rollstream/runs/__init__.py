"""Runs made from runs: forks and replays.

`fork` starts a new run from a checkpoint of another one, whose `parentage` it records. `replay`
trains the recorded steps of a run again, as they were or with other settings. `replay_output` is
the input and the output of a replay, and of offline training on trajectories from archives and JSON
lines.
"""
