"""Decides whether a trainer may continue a run after a change of its configuration.

The run's configurations are stored in its object store by hash, so that a change is shown field by
field on any machine. The ledger states which of them each term had (`Configured`), and whether a
change was accepted.
"""

import json
from typing import Any

from rollstream.config import (
    Configuration,
    Difference,
    differences,
    essentials,
    fingerprint,
    refuse_differences,
)
from storage.documents import create_same, decode, encode
from storage.objects import ObjectStore
from streams.errors import ConfigurationError, ObjectMissing

ADVICE = "use its recorded configuration, or change it from the next step on with --accept-config"


def key_of(configuration_hash: str) -> str:
    return f"configurations/{configuration_hash}.json"


def keep_configuration(store: ObjectStore, configuration: Configuration) -> None:
    """Store the essential settings under their hash; idempotent."""
    wanted = essentials(configuration)
    create_same(store, key_of(fingerprint(configuration)), encode(wanted))


def accept_change(
    store: ObjectStore, configuration: Configuration, accepted: bool, before: str
) -> bool:
    """Returns whether an accepted change is in effect; False if no essential setting changed since
    `before`. Raises `ConfigurationError` with the differences if they were not accepted.
    """
    try:
        found = changes_since(store, before, configuration)
    except ObjectMissing:
        if not accepted:
            raise ConfigurationError(
                f"the run was trained under another configuration ({before}), which is not kept: "
                f"no object {key_of(before)}; {ADVICE}"
            ) from None
        return True
    refuse_differences(found, f"the ledger ends under {before}, a run", accepted, ADVICE)
    return bool(found)


def changes_since(
    store: ObjectStore, before: str, configuration: Configuration
) -> list[Difference]:
    """Changes of essential settings since the configuration of this hash. Raises `ObjectMissing` if
    it is not stored.
    """
    key = key_of(before)
    had = decode(store.get(key), dict[str, Any], key)
    now: dict[str, Any] = json.loads(json.dumps(essentials(configuration)))
    return differences(had, now)
