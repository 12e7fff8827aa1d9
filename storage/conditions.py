"""Whether a store keeps the conditions of writes, asked of the store itself.

Terms, leases, `latest.json` and the archive rest on `create` having one winner and on `swap`
replacing only the object that was read. A server that ignores `If-None-Match` or `If-Match` answers
success to both: two trainers then hold one term, each overwrites the other's objects, and no error
says so. Three requests at the start of a process find out.
"""

import logging

from storage.objects import ObjectStore
from streams.errors import ConfigurationError, ObjectExists, StoreError, SwapLost

log = logging.getLogger(__name__)

_OTHER_DIGITS = str.maketrans("0123456789abcdef", "123456789abcdef0")


def check_conditions(store: ObjectStore, where: str, draw: str) -> None:
    """`ConfigurationError` when the store at `where` ignores a condition. `draw` names the probe's
    object: a name of its own for each process, so that any number may start at once.

    (1) The object is created. (2) Creating it again must fail. (3) Swapping it with an etag that it
    does not have must fail. It is deleted afterwards; a process that is killed in between leaves
    an object of a few bytes.
    """
    key = f"probes/{draw}"
    etag = store.create(key, b"1")  # 1
    try:
        try:
            store.create(key, b"2")  # 2
        except ObjectExists:
            pass
        else:
            raise _ignored(where, "If-None-Match", "created an object that was there")
        try:
            store.swap(key, b"3", etag.translate(_OTHER_DIGITS))  # 3
        except SwapLost:
            pass
        else:
            raise _ignored(where, "If-Match", "replaced an object that had another etag")
    finally:
        try:
            store.delete(key)
        except StoreError as error:  # what was found counts, and the object harms nothing
            log.warning("the probe of the store's conditions stays there: %s", error)


def _ignored(where: str, header: str, did: str) -> ConfigurationError:
    return ConfigurationError(
        f"store {where} ignores {header}: it {did}. Terms, leases and versions rest on conditional "
        "writes, without them two holders of one role overwrite each other. Use a server that "
        "keeps them (AWS S3, VersityGW; docs/s3.md), or switch them on at this one"
    )
