"""The archive role: writes topics of the log as Parquet files to the object store (their format:
`rollstream.storage.archive`). `service` archives all topics in turn, `topic` one, exactly once,
even if several archivers run; `compaction` keeps the files few.
"""
