"""Proposes settings of a run by simulation (`rollstream tune`).

`recorded` reads a run and `measured` its index. `machine` joins that with configuration and engine
profile to the simulated machine. `choices` are the tuned settings as one value; `cores` is for
threads that share a machine's cores. `search` finds the best choice, `proposed_toml` writes it.
"""
