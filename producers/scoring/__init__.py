"""Scorers: late rewards and other facts about finished trajectories, written as annotations.

`scorer` reads trajectories as a consumer group and publishes the annotations. `functions` loads a
scorer's function and defines the finished trajectory that it gets (`docs/how-to/late-rewards.md`).
"""
