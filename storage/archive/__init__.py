"""The archive: the log as Parquet files in the object store.

`file_names` names the files and `reading` finds and reads them. `schema` has their columns.
Messages are classified as `rows`, converted to Arrow `tables` and encoded as `files`; `merging`
merges small files. `originals` restores the exact bytes of archived records and their messages.
Archive and log are read together with `storage/log_view.py`, whose values are `segments`.
Everything but `file_names` and `reading` imports pyarrow.
"""
