"""The rollout worker: assignments in, trajectories and partials out.

`worker` is the loop. `assignments` queues what dispatch assigns and decides when new weights are
taken, `in_progress` holds the running trajectories (`trajectory`), `chain` reads the partials of
one that is resumed, `ended_turns` waits for rewards and replies. `weights` fetches versions.
`publisher` writes all records in a thread of its own and has the metrics; `heartbeat` sends the
status.
"""
