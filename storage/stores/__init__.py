"""Object stores: one contract, two back ends.

`base` is the contract, with the rules for keys and the hash of content. `file` and `s3/` implement
it. `connect` opens a store from its URL, and checks that it honours the conditions which terms,
leases and versions rely on; `read_only` opens it for readers. `json_objects` reads and writes small
JSON objects, `run_keys` declares which objects are a run's.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.storage.stores.base import (
        ListedObject as ListedObject,
        ObjectStat as ObjectStat,
        ObjectStore as ObjectStore,
        content_hash as content_hash,
    )
    from rollstream.storage.stores.connect import (
        check_conditional_writes as check_conditional_writes,
        open_store as open_store,
    )
    from rollstream.storage.stores.file import FileStore as FileStore

__getattr__ = lazy_exports(__name__)
