"""Running: from a configuration to processes.

`cli/` are the commands, `config/` the settings, `checks/` what is checked before a run, `sizes/`
whether it fits into memory. `supervisor/` starts the processes, `roles/` are what they do, by
`role_catalogue`; `warmup/` makes a first model, `metrics/` shows and forwards numbers. `signals`
handles Ctrl-C and closed pipes, `console` prints tables.
"""
