"""The identity of a run (invariant 15): `run.json` in its store, created once with an id drawn at
its start. It also names the present configuration, and the release and features that acting on the
run needs (invariant 14).

A role reads it before it takes a lease, so a program that may not act fences no other. Only the
trainer, and a launcher with an accepted change, record a configuration. A role that starts before
the trainer polls until one is recorded, so no order of starting deadlocks.
"""

import logging
import secrets
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from rollstream.config.config import (
    ADVICE_ON_CHANGE,
    changes_since_hash,
    fingerprint,
    refuse_changes,
    store_configuration,
)
from rollstream.config.settings import Configuration
from rollstream.errors import (
    ConfigurationError,
    NewerRelease,
    ObjectExists,
    ObjectMissing,
    RollstreamError,
    StoreError,
    SwapLost,
)
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import FORMAT, decode_json, encode_json
from rollstream.streams.release import (
    ADAPTERS,
    NEEDED_FEATURES,
    RELEASE,
    missing_features,
    upgrade_advice,
)

log = logging.getLogger(__name__)

IDENTITY_KEY = "run.json"
DELETED = "deleted"
"""A need that no release meets: `rollstream rm` marks a run with it, so no program of any release
acts on the run any more.
"""
UNRECORDED_S, RECORDED_S = 5.0, 60.0  # between two checks of a running role
SWAPS_MAX = 20  # the competitors are starting roles and one trainer


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """`configuration` is the hash of the present configuration, "" until the trainer recorded
    one.
    """

    id: str
    run: str
    configuration: str = ""
    release: str = ""
    needs: tuple[str, ...] = ()
    format: int = FORMAT


def read_or_create_identity(store: ObjectStore, run: str) -> RunIdentity:
    """The run's identity, created here if there is none.

    Raises `NewerRelease` if this release lacks a feature of the run, `ConfigurationError` if the
    store is another run's.
    """
    for _ in range(2):
        try:
            return _read(store, run)[0]
        except ObjectMissing:
            with suppress(ObjectExists):  # another role was first
                store.create(IDENTITY_KEY, encode_json(RunIdentity(secrets.token_hex(8), run)))
    return _read(store, run)[0]


def record_configuration(store: ObjectStore, configuration: Configuration) -> None:
    """Make this the run's present configuration, and record this release's needs. The caller has
    checked that a change is accepted.
    """
    store_configuration(store, configuration)
    for _ in range(SWAPS_MAX):
        found, etag = _read(store, configuration.run)
        own = (ADAPTERS,) if configuration.model.lora.rank else ()
        needs = tuple(sorted({*found.needs, *NEEDED_FEATURES, *own}))
        wanted = replace(
            found, configuration=fingerprint(configuration), release=RELEASE, needs=needs
        )
        try:
            if wanted != found:
                store.swap(IDENTITY_KEY, encode_json(wanted), etag)
        except SwapLost:
            continue
        return
    raise _swaps_lost()


def check_configuration(
    store: ObjectStore, configuration: Configuration, accepted: bool = False
) -> bool:
    """Whether the run's present configuration is recorded. Raises `ConfigurationError` with each
    setting in which this configuration differs from it.
    """
    try:
        identity = _read(store, configuration.run)[0]
    except ObjectMissing:  # a role that only reads the store started before the others
        return False
    if not identity.configuration or identity.configuration == fingerprint(configuration):
        return bool(identity.configuration)
    found = changes_since_hash(store, identity.configuration, configuration)
    refuse_changes(
        found, f"the store holds the run {configuration.run}, which is", accepted, ADVICE_ON_CHANGE
    )
    return True


def mark_deleted(store: ObjectStore, run: str, deleted: bool = True) -> None:
    """Mark the run as deleted, or take the mark back; idempotent. A role that starts reads the mark
    and ends; a running one reads it within `RECORDED_S`.
    """
    for _ in range(SWAPS_MAX):
        try:
            data, etag = store.read(IDENTITY_KEY)
        except ObjectMissing:
            if not deleted:
                return
            found, etag = RunIdentity(secrets.token_hex(8), run), ""
        else:
            found = decode_json(data, RunIdentity, IDENTITY_KEY)
        needs = {*found.needs, DELETED} if deleted else {*found.needs} - {DELETED}
        wanted = encode_json(replace(found, needs=tuple(sorted(needs))))
        try:
            if etag:
                store.swap(IDENTITY_KEY, wanted, etag)
            else:
                store.create(IDENTITY_KEY, wanted)
        except (SwapLost, ObjectExists):
            continue
        return
    raise _swaps_lost()


def check_exists(store: ObjectStore, run: str) -> None:
    """Raise `ConfigurationError` if the run was deleted, or is another one. A role that took a
    lease reads it once more: it may have read the identity before `rollstream rm` marked it.
    """
    try:
        _read(store, run)
    except ObjectMissing:
        raise ConfigurationError(f"the run {run} was deleted while this role started") from None


def read_identity(store: ObjectStore) -> RunIdentity | None:
    """The identity of whatever run the store holds, deleted or not; None if it holds none."""
    try:
        return decode_json(store.get(IDENTITY_KEY), RunIdentity, IDENTITY_KEY)
    except ObjectMissing:
        return None


def _swaps_lost() -> StoreError:
    return StoreError(
        f"object {IDENTITY_KEY}: lost {SWAPS_MAX} swaps in a row; what else writes it?"
    )


@contextmanager
def watch_configuration(
    store: ObjectStore, configuration: Configuration, stop: threading.Event, accepted: bool
) -> Generator[None]:
    """Run the block while this configuration agrees with the run's. When it no longer does, `stop`
    is set and the difference is raised at the end of the block.
    """
    refused: list[RollstreamError] = []
    ended = threading.Event()
    is_recorded = check_configuration(store, configuration, accepted)

    def watch() -> None:
        nonlocal is_recorded
        while not ended.wait(RECORDED_S if is_recorded else UNRECORDED_S):
            try:
                is_recorded = check_configuration(store, configuration, accepted)
            except (ConfigurationError, NewerRelease) as error:
                refused.append(error)
                stop.set()
                return
            except StoreError as error:
                log.warning("the run's configuration could not be compared: %s", error)

    thread = threading.Thread(target=watch, name="configuration", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        if refused:
            raise refused[0]


def _read(store: ObjectStore, run: str) -> tuple[RunIdentity, str]:
    data, etag = store.read(IDENTITY_KEY)
    found = decode_json(data, RunIdentity, IDENTITY_KEY)
    if DELETED in found.needs:
        raise ConfigurationError(
            f"the run {found.run} was deleted, or `rollstream rm` of it was interrupted; "
            "repeat that command to remove the rest, or give this run another store"
        )
    features = missing_features(found.needs)
    if features:
        raise NewerRelease(
            f"run {found.run} needs features that this release lacks: {', '.join(features)}; "
            f"{upgrade_advice(found.release)}"
        )
    if found.run != run:
        raise ConfigurationError(
            f"the store holds the run {found.run!r}, not {run!r}; give this run another store"
        )
    return found, etag
