"""Agents: programs whose episodes of many turns are trained (invariant 13).

`programs` starts them (`program_process`, `program_keeper`); `endpoint` answers their requests over
HTTP, and `serving` listens: `requests` and `answers` know the protocols, `chat_format` the model's
chat, `renderer_bridge` what stands between its turns, `keys` who asks. `conversation` finds the
tokens of a request among those that an episode has. `inbox` hands a `pending` turn to the rollout's
loop, where `episodes` runs each `episode`, along its `token_paths`. `service` puts these parts
together for a rollout. `front` is one address for all rollouts, which `directory` finds. `fates`
finds what became of an episode that is not open here.
"""
