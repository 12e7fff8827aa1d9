"""Runs made from runs: forks, replays, backups; and their removal.

`fork` starts a new run from a checkpoint of another one. `replay`
trains the recorded steps of a run again, as they were or with other settings. `replay_output` is
the input and the output of a replay, and of offline training on trajectories from archives and JSON
lines, whose missing log-probabilities `behaviour` computes. `token_scores` scores the recorded
tokens of a run again. `backup` copies a run as of the moment that `cut` fixes, under
`backup_keys`, and `restore` makes the same run from it. `removal` deletes the run that `run_place`
locates and proves.

`own` decides which objects of a store are a run's, `folder_files` which files of its folder, and
`links` where its links lead; `private_objects` keeps its secret closed.
"""
