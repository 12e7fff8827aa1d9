"""The archive: the log as Parquet files in the object store.

`file_names` names the files and `reading` finds and reads them. `schema` has their columns.
Messages are classified as `rows`, converted to Arrow `tables` and encoded as `files`; `merging`
merges small files. `originals` restores the exact bytes of archived records and their messages.
Archive and log are read together with `storage/log_view.py`, whose values are `segments`.
Everything but `file_names` and `reading` imports pyarrow.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.storage.archive.file_names import ArchiveFile as ArchiveFile
    from rollstream.storage.archive.files import (
        EncodedFile as EncodedFile,
        encode_file as encode_file,
    )
    from rollstream.storage.archive.reading import (
        archived_files as archived_files,
        archived_to as archived_to,
    )

__getattr__ = lazy_exports(__name__)
