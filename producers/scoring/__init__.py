"""Scorers: late rewards and other facts about finished trajectories, written as annotations.

`scorer` reads trajectories as a consumer group and publishes the annotations, except those that are
in the log already (`recorded`). `functions` loads a scorer's function and defines the finished
trajectory that it gets (`docs/how-to/late-rewards.md`). `service` asks by HTTP what `requests`
writes and reads. `build` makes either from the settings.
"""
