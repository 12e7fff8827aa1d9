"""Everything that writes trajectories.

`prompt_source` publishes prompts of the `tasks/`, whose data sets `rows/` reads, and `row_watch`
names rows that it skips. `rollout/` is the worker that generates with one of the `engines/`, which
`engine_factory` opens and which may draft from earlier answers (`drafts/`). `rewards/` runs a
task's own code in separate processes, `sandbox/` confines what a model wrote (`sandbox_settings`),
`scoring/` adds late rewards as annotations. `agents/` runs episodes of programs of many turns
(`agent_settings`), `environments/` dialogues with a task's environment, and `dialogue/` renders
chats and continues them by their tokens. `settings` has the settings of the others.
"""

if __name__ == "producers":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.producers", name="producers")
