"""Checks a run before anything of it starts (`rollstream check CONFIG`, and `rollstream run`).

`check` makes all checks and returns one line for each; nothing is written, uploaded or claimed.
`task_process` builds the task and calls its verifier in a process of its own, which gets and
writes `task_facts`; `task` starts it and judges these; `own_parts` tries what roles load there.
`model` looks at the model's folder, `model_process` builds its class without weights, `machine`
looks at ports and disk, `idle_settings` names settings without effect. `process_time` bounds both
processes by their own time.
`findings` are the lines. `fitting` changes defaults that nobody set to what fits the data.
"""
