"""`run.json` identifies the run (invariant 15). A role reads it before it takes a lease: a program
that may not act fences no other.
"""

import logging
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rollstream import errors
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import FORMAT, decode_json, encode_json
from rollstream.storage.stores.run_keys import IDENTITY, IDENTITY_KEY, RunKeys
from rollstream.streams.release import missing_features, upgrade_advice

log = logging.getLogger(__name__)

RUN_KEYS = (RunKeys(re.compile(re.escape(IDENTITY_KEY)), "cut", "any", IDENTITY),)
DELETED = "deleted"
"""A feature that no release has: a deleted run needs it, so that no program acts on it."""
SWAPS_MAX = 20  # the competitors are starting roles and one trainer


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """`configuration` is the hash of the present configuration ("" until one was recorded),
    `release` the release that recorded it, `needs` the features that a release must have to act on
    the run (`streams/release.py`), `day` the day on which the run began, as `2026-11-29` ("" for
    runs of older releases).
    """

    id: str
    run: str
    configuration: str = ""
    release: str = ""
    needs: tuple[str, ...] = ()
    day: str = ""
    format: int = FORMAT


def read_or_create_identity(store: ObjectStore, run: str) -> RunIdentity:
    """Creates the identity if the store has none. Raises `NewerRelease` if this release lacks a
    feature that the run needs, and `ConfigurationError` if the store holds another run or the run
    was deleted.
    """
    for _ in range(2):
        try:
            return _with_day(store, *read_for_acting(store, run))
        except errors.ObjectMissing:
            with suppress(errors.ObjectExists):  # another role was first
                store.create(IDENTITY_KEY, encode_json(_new_identity(run)))
    return read_for_acting(store, run)[0]


def _with_day(store: ObjectStore, identity: RunIdentity, etag: str) -> RunIdentity:
    if identity.day:
        return identity
    dated = replace(identity, day=_today())
    try:
        store.swap(IDENTITY_KEY, encode_json(dated), etag)
    except errors.SwapLost:  # another role was first
        return identity
    # Tokens may differ from those that an older release would write.
    log.warning(
        "run %s began with an older release: from now on chat templates that write the present day "
        "write %s, and the tokens between two turns of a dialogue may be others",
        identity.run,
        dated.day,
    )
    return dated


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _new_identity(run: str) -> RunIdentity:
    return RunIdentity(secrets.token_hex(8), run, day=_today())


def mark_deleted(store: ObjectStore, run: str, deleted: bool = True) -> None:
    """Marks the run as deleted, or with `deleted` False not. Idempotent. A starting role reads the
    mark and ends; a running role within a minute. With `deleted` False the mark is removed.
    """
    for _ in range(SWAPS_MAX):
        try:
            data, etag = store.read(IDENTITY_KEY)
        except errors.ObjectMissing:
            if not deleted:
                return
            identity, etag = _new_identity(run), ""
        else:
            identity = decode_json(data, RunIdentity, IDENTITY_KEY)
        needs = {*identity.needs, DELETED} if deleted else {*identity.needs} - {DELETED}
        marked = encode_json(replace(identity, needs=tuple(sorted(needs))))
        try:
            if etag:
                store.swap(IDENTITY_KEY, marked, etag)
            else:
                store.create(IDENTITY_KEY, marked)
        except (errors.SwapLost, errors.ObjectExists):
            continue
        return
    raise swaps_lost()


def check_exists(store: ObjectStore, run: str) -> None:
    """Raise `ConfigurationError` if the run was deleted, or if the store holds another run. A role
    calls this after it took a lease, before which the run may have been deleted.
    """
    try:
        read_for_acting(store, run)
    except errors.ObjectMissing:
        raise errors.ConfigurationError(
            f"the run {run} was deleted while this role started"
        ) from None


def read_identity(store: ObjectStore) -> RunIdentity | None:
    """Returns the identity of a run, deleted or not."""
    try:
        return decode_json(store.get(IDENTITY_KEY), RunIdentity, IDENTITY_KEY)
    except errors.ObjectMissing:
        return None


def check_readable(store: ObjectStore) -> None:
    """Raise `NewerRelease` if the run needs a feature that this release lacks. A deleted run may be
    read.
    """
    identity = read_identity(store)
    if identity is not None:
        _refuse_features(identity, {*identity.needs} - {DELETED})


def swaps_lost() -> errors.StoreError:
    return errors.StoreError(
        f"object {IDENTITY_KEY}: lost {SWAPS_MAX} swaps in a row; what else writes it?"
    )


def read_for_acting(store: ObjectStore, run: str) -> tuple[RunIdentity, str]:
    """Returns the identity and the object's etag. Raises if this program may not act on the run: it
    was deleted, needs a feature that this release lacks, or is another run.
    """
    data, etag = store.read(IDENTITY_KEY)
    identity = decode_json(data, RunIdentity, IDENTITY_KEY)
    if DELETED in identity.needs:
        raise errors.ConfigurationError(
            f"the run {identity.run} was deleted, or `rollstream rm` of it was interrupted; "
            "repeat that command to remove the rest, or give this run another store"
        )
    _refuse_features(identity, identity.needs)
    if identity.run != run:
        raise errors.ConfigurationError(
            f"the store holds the run {identity.run!r}, not {run!r}; give this run another store"
        )
    return identity, etag


def _refuse_features(identity: RunIdentity, needs: Collection[str]) -> None:
    features = missing_features(needs)
    if features:
        raise errors.NewerRelease(
            f"run {identity.run} needs features that this release lacks: {', '.join(features)}; "
            f"{upgrade_advice(identity.release)}"
        )
