"""Dispatch: admits groups and assigns their trajectories to rollouts.

`service` is the loop of the lease holder. `inbox` reads the topics into `state`, and `persistence`
keeps it for the next holder. `admission` decides how many groups may start, `layouts` ranks the
waves of them, and `unassigned` lists what no rollout generates. A `policy` says which rollout gets
which trajectory; those of `dispatch.placement` (`planned_policy`) are steps of a `planner` that
turns unassigned trajectories into `assignments`: `placement` picks rollouts by the expected
`lengths` and by the `kinds` of machines, `version_reload` brings back versions that no rollout
holds, `tails` starts short answers beside long ones. `moves` decides when to move requests between
rollouts, by `repack` (whole tails, and single long answers). `metrics` are those of the role. The
planners are pure functions that the simulator calls, too.
"""
