"""The rollout worker: assignments in, trajectories and partials out.

`worker` is the loop. `assignments` queues what dispatch assigns, `in_progress` holds the running
trajectories (`trajectory`), `chain` reads the partials of one that is resumed, `ended_turns` waits
for rewards and replies. `weights` fetches versions, `update_policy` decides when they are taken.
`publisher` writes all records, through the thread of `sender`; `heartbeat` sends the status.
`metrics` are the numbers that a rollout reports.
"""
