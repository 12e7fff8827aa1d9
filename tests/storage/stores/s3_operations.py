"""Each operation of an object store on an object of a chosen size, for the fault tests: the call,
and whether the stored object is the whole old or the whole new one afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rollstream.errors import ObjectMissing
from rollstream.storage.stores.base import ObjectStore

SMALL = 3_000
LARGE = (16 << 20) + 5  # written in two parts, read in two
KEY = "folder/key"


def content(seed: int, size: int) -> bytes:
    return (b"%016d" % seed) * (size // 16) + bytes([seed]) * (size % 16)


@dataclass(frozen=True)
class Operation:
    """`begin` prepares the store; `act` meets the fault and returns True if its result is right."""

    name: str
    size: int
    old: bool
    act: Callable[[ObjectStore, bytes], bool]

    def begin(self, store: ObjectStore) -> None:
        if self.old:
            store.put(KEY, content(1, self.size))

    def present(self, store: ObjectStore) -> str:
        """The stored state: `old`, `new`, `nothing`; anything else fails."""
        try:
            data = store.get(KEY)
        except ObjectMissing:
            return "nothing"
        return {content(1, self.size): "old", content(2, self.size): "new"}[data]


def _swap(store: ObjectStore, new: bytes) -> bool:
    etag = store.stat(KEY).etag
    return store.swap(KEY, new, etag) == store.stat(KEY).etag != etag


OPERATIONS = [
    Operation("get", SMALL, True, lambda s, new: s.get(KEY) == content(1, SMALL)),
    Operation("get_large", LARGE, True, lambda s, new: s.get(KEY) == content(1, LARGE)),
    Operation("get_range", LARGE, True, lambda s, _: s.get(KEY, 9, LARGE) == content(1, LARGE)[9:]),
    Operation("stat", SMALL, True, lambda s, new: s.stat(KEY).bytes == SMALL),
    Operation("list", SMALL, True, lambda s, new: [e.key for e in s.list()] == [KEY]),
    Operation("put", SMALL, True, lambda s, new: s.put(KEY, new) == s.stat(KEY).etag),
    Operation("put_large", LARGE, True, lambda s, new: s.put(KEY, new) == s.stat(KEY).etag),
    Operation("create", SMALL, False, lambda s, new: s.create(KEY, new) == s.stat(KEY).etag),
    Operation("create_large", LARGE, False, lambda s, new: s.create(KEY, new) == s.stat(KEY).etag),
    Operation("swap", SMALL, True, _swap),
    Operation("delete", SMALL, True, lambda s, new: s.delete(KEY) is None),
    Operation("delete_all", SMALL, True, lambda s, new: s.delete_all([KEY, "absent"]) is None),
]
READS = ("get", "get_large", "get_range", "stat", "list")
