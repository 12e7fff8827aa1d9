"""A node's relay: a cache of weight versions in shared memory, which also serves its neighbours.

`relay` puts one relay together. `server` sends and receives over HTTP, `client` is its other side,
`object` parses untrusted names. `intake` fills the `cache` of objects: from the neighbour before it
in the chain (`topology`), or from the object store (`bucket`). `push` is the trainer's store, which
sends new versions to the head of the chain. `store` is a rollout's store, which reads from the
node's relay and otherwise from the object store. `opening` opens both.
`docs/explanation/relay.md` explains the protocol.
"""
