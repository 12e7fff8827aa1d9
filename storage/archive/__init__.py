"""The archive: the log as Parquet files in the object store.

`file_names` names the files and `reading` finds and reads them. `schema` has their columns.
Messages are classified as `rows`, converted to Arrow `tables` and encoded as `files`; `merging`
merges small files. `originals` restores the exact bytes of archived records and their messages.
`log_view` reads archive and log as one, with `segments` as its values. `run_rules` has, in SQL, the
rules by which a run's records count. Everything but `file_names`, `reading` and `run_rules` imports
pyarrow.
"""
