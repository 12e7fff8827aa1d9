"""Attempts to leave a sandbox, each with a proof of its effect on the host.

`host` makes what the attempts aim at: a secret file, listeners, a victim process, shared memory.
`programs` holds the programs that a model could write, `attempts` joins each with its proof.
`unconfined` runs them without a sandbox: a proof that holds there can fail.
"""
