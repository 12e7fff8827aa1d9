"""Runs made from runs: forks, replays, backups; and their removal.

`fork` starts a new run from a checkpoint of another one. `replay` trains recorded steps again;
`replay_output` is its input and output, also of offline training on trajectories whose missing
log-probabilities `behaviour` computes. `token_scores` scores recorded tokens again. `backup` copies
a run as of the moment that `cut` fixes, under `backup_keys`, and `restore` makes the same run from
it. `removal` deletes the run that `run_place` locates and proves.

`own` decides which objects of a store are a run's, `folder_files` which files of its folder, and
`links` where its links lead; `private_objects` keeps its secret closed.
"""
