"""Runs made from runs: forks and backups; and their removal.

`source` opens the run from which something is made. `fork` starts a new run from a checkpoint of
another one, `replay/` trains its steps again. `backup` copies a run as of the moment that `cut`
fixes, under `backup_keys`, and `restore` makes the same run from it. `removal` deletes the run that
`run_place` locates and proves.

`own` decides which objects of a store are a run's, `folder_files` which files of its folder, and
`links` where its links lead; `private_objects` keeps its secret closed.
"""
