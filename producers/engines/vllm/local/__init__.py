"""A vLLM of this machine, and what a server by URL shares with it.

`protocol` are the calls of an engine, `core` makes them. `environment` has the supported release
and the size of an engine, `release` imports vLLM. `weights`, `staging`, `transfer` and
`parameter_map` load and read back weights, `uploads` receives those of a client. `proposer` and
`proposer_speculation` make drafts. `worker` and `transfer` run inside vLLM's workers.
"""
