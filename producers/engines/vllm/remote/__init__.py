"""A vLLM server by URL as a rollout's engine.

The client: `factory` checks and claims the server, `core` implements the calls of `protocol` on
`http` and `streams`, and `weights` sends new weights. On the server, `worker` is the extension that
its workers load. Nothing is imported here.
"""
