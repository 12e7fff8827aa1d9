"""The configuration of a run.

`settings` declares every setting and finds combinations that cannot work, `sources` reads them from
files, environment and `--set`, `config` merges, checks and compares configurations. `errors`
formats errors as one line each. `run_folder` writes `config.json` and knows the files of a run,
`run_files` declares them, `run_model` finds the model that it starts from. In the run's store
`recorded_configuration` keeps its settings in the form of `recorded_form`. `policy_defaults` has
defaults that follow `rollouts.on_update`, `fitted_defaults` those that follow other settings, and
`stored_defaults` those that another host of the run has found.
`objective_checks` finds parts of a training objective that do not go together, and `loss_table`
reads the table in which a file sets a loss with its own settings. `file_kind` tells a run's file
from a simulation's.
"""
