"""The configuration of a run.

`settings` declares every setting, `sources` reads them from files, environment and `--set`,
`config` merges, checks and compares them. `errors` formats errors as one line each. `run_folder`
writes `config.json`, `run_files` declares the files of a run, `run_model` finds the model that it
starts from. In the store `recorded_configuration` keeps settings in the form of `recorded_form`.
`policy_defaults` follow `rollouts.on_update`, `fitted_defaults` other settings, and
`stored_defaults` what another host has found. `objective_checks` finds parts of an objective that
do not go together, `loss_table` reads the table of a loss. `file_kind` tells a run's file from a
simulation's.
"""
