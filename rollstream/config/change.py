"""Decides whether a trainer may continue a run after a change of its configuration.

The run's configurations are stored in its object store by hash, so that a change is shown field by
field on any machine. The ledger states which of them each term had (`Configured`), and whether a
change was accepted.
"""

import json
from typing import Any

from rollstream.config.config import (
    SettingChange,
    essential_settings,
    fingerprint,
    refuse_changes,
    setting_changes,
)
from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import create_idempotent, decode_json, encode_json

ADVICE_ON_CHANGE = (
    "use its recorded configuration, or change it from the next step on with --accept-config"
)


def configuration_key(configuration_hash: str) -> str:
    return f"configurations/{configuration_hash}.json"


def store_configuration(store: ObjectStore, configuration: Configuration) -> None:
    """Store the essential settings under their hash; idempotent."""
    wanted = essential_settings(configuration)
    create_idempotent(store, configuration_key(fingerprint(configuration)), encode_json(wanted))


def accept_change(
    store: ObjectStore, configuration: Configuration, accepted: bool, before: str
) -> bool:
    """Returns whether an accepted change is in effect; False if no essential setting changed since
    `before`. Raises `ConfigurationError` with the differences if they were not accepted.
    """
    try:
        found = changes_since_hash(store, before, configuration)
    except ObjectMissing:
        if not accepted:
            raise ConfigurationError(
                f"the run was trained under another configuration ({before}), which is not kept: "
                f"no object {configuration_key(before)}; {ADVICE_ON_CHANGE}"
            ) from None
        return True
    refuse_changes(found, f"the ledger ends under {before}, a run", accepted, ADVICE_ON_CHANGE)
    return bool(found)


def changes_since_hash(
    store: ObjectStore, before: str, configuration: Configuration
) -> list[SettingChange]:
    """Changes of essential settings since the configuration of this hash. Raises `ObjectMissing` if
    it is not stored.
    """
    key = configuration_key(before)
    had = decode_json(store.get(key), dict[str, Any], key)
    now: dict[str, Any] = json.loads(json.dumps(essential_settings(configuration)))
    return setting_changes(had, now)
