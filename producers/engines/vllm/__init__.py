"""vLLM as an engine. Importing this package imports nothing of vLLM; `local/release` alone does.

`kind` is what is known before one is opened. `engine` implements the contract on the calls that
`local/` makes to a vLLM of this machine and `remote/` to a server by URL; `adapters` serves LoRA
versions side by side.
"""
