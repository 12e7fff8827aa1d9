"""Everything that writes trajectories.

`prompt_source` publishes prompts of the `tasks`. `rollout` is the worker that generates with one of
the `engines`, which may draft from earlier answers (`drafts`). `rewards` runs a task's own code in
separate processes, `scoring` adds late rewards as annotations. `evaluation` measures a version on
held-out prompts. `settings` has the settings of all of them.
"""

if __name__ == "producers":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.producers", name="producers")
