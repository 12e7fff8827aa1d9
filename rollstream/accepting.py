"""Whether a trainer may go on: the run's configurations lie in its store, by hash, so that a change
is shown field by field on any machine.

The ledger says which of them each term had (`Configured`), and whether a change was accepted.
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

ADVICE = "go on with the configuration that it had, or change it from here on with --accept-config"


def key_of(configuration_hash: str) -> str:
    return f"configurations/{configuration_hash}.json"


def keep_configuration(store: ObjectStore, configuration: Configuration) -> None:
    """Put what matters of it under its hash, once."""
    wanted = essentials(configuration)
    create_same(store, key_of(fingerprint(configuration)), encode(wanted))


def accept_change(
    store: ObjectStore, configuration: Configuration, accepted: bool, before: str
) -> bool:
    """Whether the run goes on under a change that was accepted; False when nothing that matters
    changed since `before`. `ConfigurationError` shows what was not accepted.
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
    """In what matters, since the configuration of this hash; `ObjectMissing` if it is not kept."""
    key = key_of(before)
    had = decode(store.get(key), dict[str, Any], key)
    now: dict[str, Any] = json.loads(json.dumps(essentials(configuration)))
    return differences(had, now)
