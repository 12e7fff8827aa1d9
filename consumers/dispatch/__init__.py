"""Dispatch: admits groups and assigns their trajectories to rollouts.

`service` is the loop of the lease holder, `inbox` reads the topics into `state`, and `persistence`
keeps it for the next holder. `admission` decides how many groups may start, `layouts` ranks their
waves, and `unassigned` lists what no rollout generates. A `policy` picks rollouts; those of
`dispatch.placement` (`planned_policy`) are steps of a `planner` that makes `assignments`:
`placement` uses the expected `lengths` and the `kinds` of machines, `version_reload` brings back
versions that no rollout holds, `tails` starts short answers beside long ones. `moves` decides when
requests move, `repack` which.
"""
