"""Secrets of a run in another store: in a folder, a file that no other user of the machine may
read.
"""

from rollstream.keep.own import declared_keys
from rollstream.storage.stores.base import Data, ObjectStore
from rollstream.storage.stores.file import FileStore


def put_private(store: ObjectStore, key: str, data: Data, name: str) -> None:
    """`name` is the object's key in the run's store, which declares a secret."""
    declared = declared_keys(name)
    if not (isinstance(store, FileStore) and declared is not None and declared.private):
        store.put(key, data)
        return
    path = store.path(key)
    # The folder is closed first, so no other user can open the file in between.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    store.put(key, data)
    path.chmod(0o600)
