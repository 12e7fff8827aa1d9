"""Proposes settings of a run by simulation (`rollstream tune`).

`measured` asks a recorded run's index what it shows of engine, trainer and answers. `machine`
joins that with configuration and engine profile to the simulated machine and its work. `choices`
are the tuned settings as one value, with the values that each may take; `cores` is for threads
that share the cores of one machine. `search` finds the best choice by the simulator's predictions.
`choices`, `cores` and `search` are pure; `recorded` reads the run, `proposed_toml` writes settings,
and `rollstream/run/cli/tune.py` prints.
"""
