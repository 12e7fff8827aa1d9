"""Roles and tools that read the log of a run. They never import producers.

`trainer/` trains groups and publishes versions, by an objective of `objectives/`; `dispatch/`
admits, places and moves trajectories, `archive/` writes the log as Parquet files: these are roles
with a single holder. `audit/` verifies the invariants of a run, `settings` are those of the roles,
`objective_settings` those of the objective, and `credit` has the rewards of turns and tokens.
Consumers never import producers: both share only the records of `rollstream.streams`.
"""

if __name__ == "consumers":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.consumers", name="consumers")
