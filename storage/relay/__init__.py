"""A node's relay: a cache of weight versions in shared memory, which also serves its neighbours.

`relay` puts one relay together. `server` sends and receives over HTTP, `client` is its other side,
`names` parses untrusted requests. `intake` fills the `cache` of `object`s: from the `neighbour`
before it in the chain (`topology`), or from the object store (`bucket`). `push` is the trainer's
store, which sends new versions to the head of the chain. `store` is a rollout's store, which reads
from the node's relay and otherwise from the object store. `docs/relay.md` explains the protocol.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.storage.relay.push import PushingStore
    from rollstream.storage.relay.relay import Relay
    from rollstream.storage.relay.settings import RelaySettings, folder_for
    from rollstream.storage.relay.store import RelayStore
    from rollstream.storage.relay.topology import RelayDirectory

__all__ = ["PushingStore", "Relay", "RelayDirectory", "RelaySettings", "RelayStore", "folder_for"]

_MODULES = {
    "PushingStore": "push",
    "Relay": "relay",
    "RelayDirectory": "topology",
    "RelaySettings": "settings",
    "RelayStore": "store",
    "folder_for": "settings",
}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
