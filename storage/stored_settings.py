"""Reads the settings that a run has put into its store under their hash (`recorded_settings`), for
programs that need no model of the settings.
"""

import re
from typing import Any

from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import decode_json

CONFIGURATION_KEY = re.compile(r"configurations/[0-9a-f]{32}\.json")


def is_configuration_hash(text: str) -> bool:
    """Returns whether a record names a configuration by this text: runs of tests do not."""
    return CONFIGURATION_KEY.fullmatch(configuration_key(text)) is not None


def configuration_key(configuration_hash: str) -> str:
    return f"configurations/{configuration_hash}.json"


def recorded_settings(store: ObjectStore, configuration_hash: str) -> dict[str, Any]:
    """Returns the recorded settings of this hash by their dotted keys; absent ones have their
    default. Raises `ObjectMissing` if they are not stored.
    """
    key = configuration_key(configuration_hash)
    return decode_json(store.get(key), dict[str, Any], key)
