"""What identifies a run (invariant 15): `run.json` in its store, created once with an id drawn at
the begin. It names the present configuration too, and the release and features that acting on the
run takes (invariant 14).

A role reads it before it takes a lease, so a program that may not act fences nobody. Only the
trainer, and a launcher that was told to accept a change, record a configuration; a role that starts
before the trainer looks again until there is one, so no order of starting is a deadlock.
"""

import logging
import secrets
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from rollstream.accepting import ADVICE, changes_since, keep_configuration
from rollstream.config import Configuration, fingerprint, refuse_differences
from storage.documents import FORMAT, decode, encode
from storage.objects import ObjectStore
from streams.errors import (
    ConfigurationError,
    NewerRelease,
    ObjectExists,
    ObjectMissing,
    RollstreamError,
    StoreError,
    SwapLost,
)
from streams.release import NEEDED, RELEASE, advice, lacking

log = logging.getLogger(__name__)

KEY = "run.json"
UNRECORDED_S, RECORDED_S = 5.0, 60.0  # between two looks of a running role
SWAPS_MAX = 20  # rivals are starting roles and one trainer


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """`configuration` is the hash of the present one, "" until the trainer recorded it."""

    id: str
    run: str
    configuration: str = ""
    release: str = ""
    needs: tuple[str, ...] = ()
    format: int = FORMAT


def identify(store: ObjectStore, run: str) -> RunIdentity:
    """The run's identity, drawn here if it has none.

    `NewerRelease` if this release lacks a feature of the run, `ConfigurationError` if the store is
    another run's.
    """
    for _ in range(2):
        try:
            return _read(store, run)[0]
        except ObjectMissing:
            with suppress(ObjectExists):  # another role was first
                store.create(KEY, encode(RunIdentity(secrets.token_hex(8), run)))
    return _read(store, run)[0]


def record(store: ObjectStore, configuration: Configuration) -> None:
    """Make this the run's present configuration, and this release's needs the run's. The caller
    checked that a change is accepted.
    """
    keep_configuration(store, configuration)
    for _ in range(SWAPS_MAX):
        found, etag = _read(store, configuration.run)
        needs = tuple(sorted({*found.needs, *NEEDED}))
        wanted = replace(
            found, configuration=fingerprint(configuration), release=RELEASE, needs=needs
        )
        try:
            if wanted != found:
                store.swap(KEY, encode(wanted), etag)
        except SwapLost:
            continue
        return
    raise StoreError(f"object {KEY}: lost {SWAPS_MAX} swaps in a row; what else writes it?")


def check_agrees(store: ObjectStore, configuration: Configuration, accepted: bool = False) -> bool:
    """Whether the run's present configuration is recorded; `ConfigurationError` names each setting
    in which this one differs from it.
    """
    try:
        identity = _read(store, configuration.run)[0]
    except ObjectMissing:  # a role that only reads the store started before the others
        return False
    if not identity.configuration or identity.configuration == fingerprint(configuration):
        return bool(identity.configuration)
    found = changes_since(store, identity.configuration, configuration)
    refuse_differences(
        found, f"the store holds the run {configuration.run}, which is", accepted, ADVICE
    )
    return True


@contextmanager
def agreeing(
    store: ObjectStore, configuration: Configuration, stop: threading.Event, accepted: bool
) -> Generator[None]:
    """A role works in the block while its configuration agrees with the run's; `stop` is set when
    it no longer does, and the difference raised at the end.
    """
    refused: list[RollstreamError] = []
    ended = threading.Event()
    is_recorded = check_agrees(store, configuration, accepted)

    def watch() -> None:
        nonlocal is_recorded
        while not ended.wait(RECORDED_S if is_recorded else UNRECORDED_S):
            try:
                is_recorded = check_agrees(store, configuration, accepted)
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
    data, etag = store.read(KEY)
    found = decode(data, RunIdentity, KEY)
    features = lacking(found.needs)
    if features:
        raise NewerRelease(
            f"run {found.run} takes what this release does not know: {', '.join(features)}; "
            f"{advice(found.release)}"
        )
    if found.run != run:
        raise ConfigurationError(
            f"the store holds the run {found.run!r}, not {run!r}; give this run another store"
        )
    return found, etag
