"""The roles: each is one process that `roles.run_role` builds from the configuration and runs.

`context` opens log, store and task. `completion` tells a role that the run is complete. Larger
roles have a module: `rollout` (which also measures profiles), `train`, `relay`, `evaluation`,
`observe`, `scorer`, `reference` (its model); the others are built in `roles`.
"""
