"""The roles: each is one process that `roles.run_role` builds from the configuration and runs.

`catalogue` declares each role once. `context` opens what a role needs: log, store, task. Roles that
need more than a few lines have a module: `rollout`, `train`, `evaluation`, `relay_and_scorer`;
dispatch, archive and prompt source are built in `roles`. `profiling` measures an engine.
"""
