"""The command line. Each command is one module with a function `main(arguments)`.

`main` dispatches to it; `grammar` and `grammar_runs` hold the argument parsers, apart from the
commands' modules, so that `--help` imports nothing heavy. `configuration` loads the settings that a
command names, `signals` handles Ctrl-C and closed pipes. `history/` has the commands on weights and
checkpoints, `replay/` fork and the three kinds of replay.
"""
