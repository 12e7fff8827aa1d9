"""Checks a run before anything of it starts; nothing is written, uploaded or claimed.

`check` makes all checks; `findings` are its lines. `task_process` builds the task and calls its
verifier in a process of its own, which writes `task_facts`; `task` judges these; `own_parts` tries
what roles load there. `model` looks at the model's folder, `model_process` builds its class without
weights, `machine` looks at ports and disk, `idle_settings` names settings without effect.
`process_time` bounds both processes by their own time. `fitting` changes unset defaults to what
fits the data.
"""
