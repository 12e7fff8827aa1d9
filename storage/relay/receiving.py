"""Receives a push: an object from where it ends here, straight into shared memory, kept only if it
matches the announced hash.
"""

import logging
from collections.abc import Callable

from rollstream.storage.relay.answers import HttpResponder
from rollstream.storage.relay.names import parse_push_range
from rollstream.storage.relay.object import CachedObject, ObjectBusy, ObjectDropped
from rollstream.storage.relay.names_part import ObjectOffer
from rollstream.storage.relay.cache import RelayCache
from rollstream.errors import CorruptObject

log = logging.getLogger(__name__)


def receive_push(sender: HttpResponder, shelf: RelayCache, key: str, on_bytes: Callable[[], None]) -> None:
    """Receive an object from `Content-Range` on; 409 if that is not where it ends here. `on_bytes`
    is called whenever bytes arrive.
    """
    headers = sender.headers
    start, size = parse_push_range(headers.get("Content-Range"), headers.get("Content-Length"))
    offer = ObjectOffer(key, size, headers.get("X-Content-Hash", ""))
    if not offer.is_sound:
        raise ValueError("a push needs X-Content-Hash, 32 hex digits")
    held = shelf.accept(offer) if shelf.wants_push(offer) else None
    if held is None:
        return sender.close(409)
    try:
        with held.writing():
            if held.written != start or (held.verified and size):
                raise ObjectBusy(f"object {key}: it is here up to byte {held.written}")
            if headers.get("Expect", "").lower() == "100-continue":
                sender.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            _write(sender, shelf, held, on_bytes)
    except (ObjectBusy, ObjectDropped):
        return sender.close(409)
    except CorruptObject as error:
        log.error("%s", error)
        shelf.add("relay_wrong_total", 1)
        return sender.close(422)
    shelf.completed(held)
    return sender.empty(201)


def _write(sender: HttpResponder, shelf: RelayCache, held: CachedObject, on_bytes: Callable[[], None]) -> None:
    while not held.verified:
        count = sender.rfile.readinto1(held.room())  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise ConnectionError("the push ended in the middle")
        on_bytes()
        held.advance(count)
        shelf.add("relay_pushed_bytes_total", count)
