"""Opens an object store, and checks that it honours conditional writes: where `If-None-Match` or
`If-Match` is ignored, two trainers hold one term and overwrite each other's objects without any
error.
"""

import logging
from math import inf
from typing import Literal

from rollstream.errors import ConfigurationError, ObjectExists, StoreError, SwapLost
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.kind import store_forms, store_kind


def open_store(
    url: str, sync: Literal["normal", "full"] = "normal", deadline_s: float = inf
) -> ObjectStore:
    """Raises `ConfigurationError` for an unknown scheme or a missing library. No operation waits
    longer for a server than `deadline_s` or, if shorter, its URL allows.
    """
    kind = store_kind(url)
    if kind is not None:
        return kind.open(url, sync, deadline_s)
    scheme, separator, _ = url.partition(":")
    what = f"unknown scheme {scheme!r}" if separator else "no scheme"
    raise ConfigurationError(f"store URL {url!r}: {what}; known are {', '.join(store_forms())}")


log = logging.getLogger(__name__)

# Changes every hexadecimal digit of an etag, which gives one that the object does not have.
_OTHER_DIGITS = str.maketrans("0123456789abcdef", "123456789abcdef0")


def check_conditional_writes(store: ObjectStore, where: str, draw: str) -> None:
    """Raise `ConfigurationError` if the store ignores conditions. (1) An object is created. (2)
    Creating it again must fail. (3) Swapping it with another etag must fail. `draw`, a random name
    per process, names it: many processes may start at once; a killed one leaves one byte.
    """
    key = f"probes/{draw}"
    etag = store.create(key, b"1")  # 1
    try:
        try:
            store.create(key, b"2")  # 2
        except ObjectExists:
            pass
        else:
            raise _ignored(where, "If-None-Match", "created an object that already existed")
        try:
            store.swap(key, b"3", etag.translate(_OTHER_DIGITS))  # 3
        except SwapLost:
            pass
        else:
            raise _ignored(where, "If-Match", "replaced an object that had another etag")
    finally:
        try:
            store.delete(key)
        except StoreError as error:  # the result stands, and the object does no harm
            log.warning("the probe of conditional writes was not deleted: %s", error)


def _ignored(where: str, header: str, did: str) -> ConfigurationError:
    return ConfigurationError(
        f"store {where} ignores {header}: it {did}. Terms, leases and versions rely on conditional "
        "writes; without them two holders of one role overwrite each other. Use a server that "
        "supports them (AWS S3, VersityGW; docs/reference/s3.md), or enable them on this one"
    )
