"""vLLM as an engine. Importing this package imports nothing of vLLM; `release` alone imports it.

`kind` is what is known before one is opened. `engine` implements the contract on the calls of
`protocol`, which `core` implements for a vLLM of this machine and `remote/` for a server by URL.
`environment` has the supported release and the size of an engine. `weights`, `staging`, `transfer`
and `parameter_map` load and read back weights; `adapters` does so with LoRA versions side by side.
`drafts`, `proposer` and `proposer_speculation` make drafts. `worker` and `transfer` run inside
vLLM's workers.
"""
