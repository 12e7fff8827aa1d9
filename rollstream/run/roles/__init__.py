"""The roles: each is one process that `roles.run_role` builds from the configuration and runs.

`context` opens what a role needs: log, store, task.
`completion` tells a role that the run is complete. Roles that need more than a few lines have a
module: `rollout`, `train`, `relay`, `evaluation`, `observe`, `scorer`, `reference` (its model); the
others are built in `roles`. `rollout` also measures an engine's profile.
"""
