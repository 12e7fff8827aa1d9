"""The configuration of a run.

`settings` declares every setting, `sources` reads them from files, environment and `--set`,
`config` merges, checks and compares configurations. `validation` finds combinations that cannot
work, `errors` formats errors as one line each. `run_folder` writes `config.json` and knows the
files of a run; `identity` is the run's id in its store.
"""
