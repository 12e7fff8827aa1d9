"""`run.json` in a run's store identifies the run (invariant 15): it is created once, with an id
drawn at the run's start. It also holds the hash of the present configuration, and the features that
a program's release must have to act on the run (invariant 14).

A role reads this object before it takes a lease, so a program that may not act fences no other.
Only the trainer, and a launcher with an accepted change, record a configuration. A role that starts
earlier does not wait for it, but compares again every few seconds, so any order of starting works.
"""

import logging
import secrets
import threading
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from rollstream import errors
from rollstream.config.config import (
    ADVICE_ON_CHANGE,
    changes_since_hash,
    fingerprint,
    refuse_changes,
    store_configuration,
)
from rollstream.config.settings import Configuration
from rollstream.consumers.objective_settings import GAE, scored_reference
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import FORMAT, decode_json, encode_json
from rollstream.streams.release import (
    ABANDONED,
    ADAPTERS,
    AGENTS,
    CRITIC,
    EPOCHS,
    NEEDED_FEATURES,
    PROCESS_REWARDS,
    REDUNDANCY,
    RELEASE,
    SCORED_REFERENCE,
    missing_features,
    upgrade_advice,
)

log = logging.getLogger(__name__)

IDENTITY_KEY = "run.json"
DELETED = "deleted"
"""A feature that no release has: `rollstream rm` adds it to the needs of a run, so no program of
any release acts on the run any more.
"""
# Seconds between two checks, before and after a configuration is recorded.
UNRECORDED_S, RECORDED_S = 5.0, 60.0
SWAPS_MAX = 20  # the competitors are starting roles and one trainer


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The content of `run.json`: the drawn `id` and the name `run`. `configuration` is the hash of
    the present configuration, "" until one was recorded; `release` is the release that recorded it.
    `needs` are the features that a release must have to act on the run (`streams/release.py`).
    """

    id: str
    run: str
    configuration: str = ""
    release: str = ""
    needs: tuple[str, ...] = ()
    format: int = FORMAT


def read_or_create_identity(store: ObjectStore, run: str) -> RunIdentity:
    """Returns the run's identity and creates it if the store has none.

    Raises `NewerRelease` if this release lacks a feature that the run needs, and
    `ConfigurationError` if the store holds another run or the run was deleted.
    """
    for _ in range(2):
        try:
            return _read(store, run)[0]
        except errors.ObjectMissing:
            with suppress(errors.ObjectExists):  # another role was first
                store.create(IDENTITY_KEY, encode_json(RunIdentity(secrets.token_hex(8), run)))
    return _read(store, run)[0]


def record_configuration(store: ObjectStore, configuration: Configuration) -> None:
    """Make this the run's present configuration, and add the features that a program must have to
    read what this release writes. The caller has checked that a change is accepted.
    """
    store_configuration(store, configuration)
    for _ in range(SWAPS_MAX):
        found, etag = _read(store, configuration.run)
        own = _features_of_settings(configuration)
        needs = tuple(sorted({*found.needs, *NEEDED_FEATURES, *own}))
        wanted = replace(
            found, configuration=fingerprint(configuration), release=RELEASE, needs=needs
        )
        try:
            if wanted != found:
                store.swap(IDENTITY_KEY, encode_json(wanted), etag)
        except errors.SwapLost:
            continue
        return
    raise _swaps_lost()


def _features_of_settings(configuration: Configuration) -> set[str]:
    """Returns those of `FEATURES_OF_SETTINGS` that a run with this configuration needs."""
    uses = {
        ADAPTERS: configuration.model.lora.rank,
        AGENTS: configuration.agent.is_active,
        ABANDONED: configuration.agent.is_active,
        CRITIC: configuration.trainer.advantage == GAE,
        EPOCHS: configuration.trainer.epochs > 1,
        PROCESS_REWARDS: configuration.trainer.process_rewards,
        REDUNDANCY: configuration.task.redundancy,
        SCORED_REFERENCE: scored_reference(configuration.trainer),
    }
    return {feature for feature, is_used in uses.items() if is_used}


def check_configuration(
    store: ObjectStore, configuration: Configuration, accepted: bool = False
) -> bool:
    """Compare this configuration with the recorded one. Returns whether one is recorded. Raises
    `ConfigurationError`, which lists the settings that differ from it; with `accepted` only those
    that can never change in a run.
    """
    try:
        identity = _read(store, configuration.run)[0]
    except errors.ObjectMissing:  # a role that only reads the store started before the others
        return False
    if not identity.configuration or identity.configuration == fingerprint(configuration):
        return bool(identity.configuration)
    found = changes_since_hash(store, identity.configuration, configuration)
    refuse_changes(
        found, f"the store holds the run {configuration.run}, which is", accepted, ADVICE_ON_CHANGE
    )
    return True


def mark_deleted(store: ObjectStore, run: str, deleted: bool = True) -> None:
    """Mark the run as deleted, or with `deleted` False remove the mark. Idempotent. A starting role
    reads the mark and ends; a running role reads it within `RECORDED_S` seconds and ends.
    """
    for _ in range(SWAPS_MAX):
        try:
            data, etag = store.read(IDENTITY_KEY)
        except errors.ObjectMissing:
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
        except (errors.SwapLost, errors.ObjectExists):
            continue
        return
    raise _swaps_lost()


def check_exists(store: ObjectStore, run: str) -> None:
    """Raise `ConfigurationError` if the run was deleted, or if the store holds another run. A role
    calls this after it took a lease, because `rollstream rm` may have marked the run after the role
    read this object first.
    """
    try:
        _read(store, run)
    except errors.ObjectMissing:
        raise errors.ConfigurationError(
            f"the run {run} was deleted while this role started"
        ) from None


def read_identity(store: ObjectStore) -> RunIdentity | None:
    """Returns the identity of the run in this store, deleted or not; None if it holds no run."""
    try:
        return decode_json(store.get(IDENTITY_KEY), RunIdentity, IDENTITY_KEY)
    except errors.ObjectMissing:
        return None


def check_readable(store: ObjectStore) -> None:
    """Raise `NewerRelease` if the run in this store needs a feature that this release lacks, so
    that a reader of its records would judge them wrongly. A deleted run may be read.
    """
    found = read_identity(store)
    if found is not None:
        _refuse_features(found, {*found.needs} - {DELETED})


def _swaps_lost() -> errors.StoreError:
    return errors.StoreError(
        f"object {IDENTITY_KEY}: lost {SWAPS_MAX} swaps in a row; what else writes it?"
    )


@contextmanager
def watch_configuration(
    store: ObjectStore, configuration: Configuration, stop: threading.Event, accepted: bool
) -> Generator[None]:
    """Compare this configuration with the recorded one at the start, which raises a difference that
    is not `accepted`, and again and again in a thread while the block runs. If the thread finds a
    difference, or that the run was deleted, it sets `stop`, and the error is raised at the end of
    the block. A store that cannot be read is logged and read again later.
    """
    refused: list[errors.RollstreamError] = []
    ended = threading.Event()
    is_recorded = check_configuration(store, configuration, accepted)

    def watch() -> None:
        nonlocal is_recorded
        while not ended.wait(RECORDED_S if is_recorded else UNRECORDED_S):
            try:
                is_recorded = check_configuration(store, configuration, accepted)
            except (errors.ConfigurationError, errors.NewerRelease) as error:
                refused.append(error)
                stop.set()
                return
            except errors.StoreError as error:
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
    """Returns the identity and the object's etag. Raises if this program may not act on the run: it
    was deleted, needs a feature that this release lacks, or is another run.
    """
    data, etag = store.read(IDENTITY_KEY)
    found = decode_json(data, RunIdentity, IDENTITY_KEY)
    if DELETED in found.needs:
        raise errors.ConfigurationError(
            f"the run {found.run} was deleted, or `rollstream rm` of it was interrupted; "
            "repeat that command to remove the rest, or give this run another store"
        )
    _refuse_features(found, found.needs)
    if found.run != run:
        raise errors.ConfigurationError(
            f"the store holds the run {found.run!r}, not {run!r}; give this run another store"
        )
    return found, etag


def _refuse_features(found: RunIdentity, needs: Collection[str]) -> None:
    features = missing_features(needs)
    if features:
        raise errors.NewerRelease(
            f"run {found.run} needs features that this release lacks: {', '.join(features)}; "
            f"{upgrade_advice(found.release)}"
        )
