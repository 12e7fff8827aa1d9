"""Agents: programs whose episodes of many turns are trained (invariant 13).

`programs` starts them, `endpoint` answers their requests over HTTP (`requests` and `answers` know
the protocols, `chat_format` the model's chat, `keys` who asks), `conversation` finds the tokens of
a request among those that the episode has. `inbox` hands requests to the rollout's loop, where
`episodes` runs the open ones. `serving` listens in a thread of the rollout.
"""
