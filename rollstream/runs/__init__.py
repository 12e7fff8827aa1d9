"""Runs made from runs: forks and replays.

`fork` starts a new run from a checkpoint of another one, whose `parentage` it records. `replay`
trains the recorded steps of a run again, as they were or with other settings; `replay_offline`
trains on trajectories from archives and JSON lines. Both write through `replay_output`.
"""
