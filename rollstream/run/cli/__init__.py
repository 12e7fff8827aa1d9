"""The command line. Each command is a module, which declares its arguments beside its code:
`add_arguments(command)` and `main(arguments)`; one with several actions, as `weights`, also
`ACTIONS`.

`commands` is the table of all commands, `arguments` their parser; neither imports a command's
module before it is chosen. This folder has what starts a run or a role or comes before one
(`check`, `run`, `role`, `warmup`, `put_model`, `plan`, `profile`, `tune`, `simulate`), `look/` what
reads one, `change/` what makes another run from it, `maintain/` what keeps it. `configuration`
loads the settings that a command names.
"""
