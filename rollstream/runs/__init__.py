"""Runs made from runs: forks, replays, backups; and their removal.

`fork` starts a new run from a checkpoint of another one, whose `parentage` it records. `replay`
trains the recorded steps of a run again, as they were or with other settings. `replay_output` is
the input and the output of a replay, and of offline training on trajectories from archives and JSON
lines. `backup` copies a run as of the moment that `cut` fixes, and `restore` makes the same run
from it. `removal` deletes one.
"""
