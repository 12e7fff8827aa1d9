"""The rollout worker: assignments in, trajectories and partials out.

`worker` is the loop. `assignments` queues what dispatch assigns and decides when new weights are
taken, `tail_filling` decides what starts beside the last long answers. `in_progress` holds the
running trajectories (`trajectory`), `chain` reads the partials of one that is resumed,
`turn_driver` says what moves them through their turns, `single_turn` is that of answers to prompts,
`judging` waits for rewards. `weights` fetches versions, `read_back` compares the served tensors.
`publisher` makes all records, which a `sender` writes in a thread of its own, `heartbeat` sends the
status, `loop_metrics` collects the metrics. `evaluation` measures a version on held-out prompts.
"""
