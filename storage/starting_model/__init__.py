"""The model that a run starts from, as immutable objects in the run's store: any host reads it
there, and no role needs a model's folder of its own.

It is not version 0: the trainer makes that from it, in `weights.dtype` and under its own term. So
masters begin with the model's own bits, an upload needs neither torch nor a trainer, ranks verify
the rows that they read, and tokenizer, adapter and the task's files are of the same upload.

`manifest` describes the files and the blocks of their tensors' rows, `put` creates the objects,
`reading` reads and verifies files and rows, `rows` makes tensors of them (`fetch_rows`).
`models` builds a model from a configuration, a folder or a version.
"""
