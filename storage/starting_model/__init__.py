"""The model that a run starts from, as immutable objects in the run's store: any host reads it
there, and no role needs a model's folder of its own.

`manifest` describes the files and the blocks of their tensors' rows, `put` creates the objects,
`reading` reads and verifies files and rows, `rows` makes tensors of them (`fetch_rows`).
`models` builds a model from a configuration, a folder or a version.
"""
