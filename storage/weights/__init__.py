"""Weight versions: immutable, checksummed sets of objects, published by the trainer and fetched by
rollouts.

`publish` writes a version, as an anchor or as `differences` (`delta/`), in files (`shards`) that a
`manifest` completes; `pointer` makes it the believed one. `anchors` decides when an anchor is due,
`retention` which versions are deleted. A reader plans the cheapest path to each tensor
(`fetch_plan`) and executes it (`fetch_execution`); `fetch` returns tensors once, or writes a
version as a folder; `resident` keeps them in memory and updates them, `mapped` in a file;
`streamed` fetches a version into a file and decodes it from there. `tensors` converts tensors to
bytes, also those that several processes hold. `form` says what a version is: `whole` weights, or
one of `adapters`. `named_streams` gives each model of a run versions of its own.
`verify` checks and compares versions; `checkpoints` holds the trainer's state beside them.
"""
