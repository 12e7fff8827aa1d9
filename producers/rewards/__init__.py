"""Rewards and environment replies, computed by a task's own code in separate processes.

`pool` is the interface: it queues questions and returns one outcome for each. `process` is the
program that runs in each process, and `worker` starts and ends it; `facts` are those that a
scorer's call gets, `foreign_number` takes the rewards of a user's code. The replies of an
environment with an `async def reply` come from the program `environment`, one process for all,
which `replies` asks.
"""
