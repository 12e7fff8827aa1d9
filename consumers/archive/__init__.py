"""The archive role: writes topics of the log as Parquet files to the object store.

`service` archives all topics in turn, `topic` archives one: exactly once, even if several archivers
run. `compaction` keeps the files few. The format of the files and their readers are in
`rollstream.storage.archive`.
"""
