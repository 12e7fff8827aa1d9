"""A run's configuration in its store, with which each role compares its own. Only the trainer, and
a launcher with an accepted change, record one; others compare again every few seconds, so any order
of starting works.
"""

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from rollstream import errors
from rollstream.consumers.credit import GAE, scored_reference
from rollstream.run.config.config import (
    ADVICE_ON_CHANGE,
    changes_since_hash,
    fingerprint,
    refuse_changes,
    store_configuration,
    validate_layers,
)
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import SettingLayers
from rollstream.storage.identity import (
    IDENTITY_KEY,
    SWAPS_MAX,
    read_for_acting,
    read_identity,
    swaps_lost,
)
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.checkpoints import stored_checkpoints
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Prompt
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
)

log = logging.getLogger(__name__)

# Seconds between two checks, before and after a configuration is recorded.
UNRECORDED_S, RECORDED_S = 5.0, 60.0


def record_configuration(store: ObjectStore, configuration: Configuration) -> None:
    """Makes this the run's present one, with the features that a reader must have. The caller has
    checked that a change is accepted.
    """
    store_configuration(store, configuration)
    for _ in range(SWAPS_MAX):
        identity, etag = read_for_acting(store, configuration.run)
        features = _features_of_settings(configuration)
        needs = tuple(sorted({*identity.needs, *NEEDED_FEATURES, *features}))
        updated = replace(
            identity, configuration=fingerprint(configuration), release=RELEASE, needs=needs
        )
        try:
            if updated != identity:
                store.swap(IDENTITY_KEY, encode_json(updated), etag)
        except errors.SwapLost:
            continue
        return
    raise swaps_lost()


def _features_of_settings(configuration: Configuration) -> set[str]:
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
    rollouts = configuration.rollouts
    return {feature for feature, is_used in uses.items() if is_used} | rollouts.kind.needs(rollouts)


def check_configuration(
    store: ObjectStore, configuration: Configuration, accepted: bool = False
) -> bool:
    """Returns whether one is recorded. Raises `ConfigurationError` with the settings that differ
    from it, if `accepted` only those that can never change.
    """
    try:
        identity = read_for_acting(store, configuration.run)[0]
    # A role that only reads the store started before the others.
    except errors.ObjectMissing:
        return False
    if not identity.configuration or identity.configuration == fingerprint(configuration):
        return bool(identity.configuration)
    changes = changes_since_hash(store, identity.configuration, configuration)
    where = f"the store holds the run {configuration.run}, which is"
    refuse_changes(changes, where, accepted, ADVICE_ON_CHANGE, configuration)
    return True


def accepted_changes(bus: Bus, store: ObjectStore, configuration: Configuration) -> list[str]:
    """Returns the accepted changes for each setting that differs from the recorded configuration,
    from where on the change holds. Nothing may publish meanwhile.
    """
    identity = read_identity(store)
    if identity is None or identity.configuration in ("", fingerprint(configuration)):
        return []
    try:
        changes = changes_since_hash(store, identity.configuration, configuration)
    except errors.ObjectMissing:
        return []
    pointer = believed_pointer(store)
    done = 0 if pointer is None or pointer.version is None else pointer.version.number
    checkpoint_step = max(
        (stored.id.step for stored in stored_checkpoints(store) if stored.whole), default=0
    )
    steps = range(checkpoint_step + 1, max(done, checkpoint_step + 1) + 1)
    reader = TopicReader(bus, "prompts", from_begin(bus, "prompts"))
    prompts = (received.record for received in reader.read_to(bus.end("prompts")))
    group = max((prompt.group for prompt in prompts if isinstance(prompt, Prompt)), default=-1) + 1
    return [change.holds_from(steps, group) for change in changes]


def present_configuration(store: ObjectStore, configuration: Configuration) -> Configuration:
    """Returns the present configuration with the run's present values of recorded settings. Raises
    `ConfigurationError` if this release cannot read them.
    """
    identity = read_identity(store)
    if identity is None or identity.configuration in ("", fingerprint(configuration)):
        return configuration
    layers = SettingLayers(configuration.model_dump(mode="json"))
    for change in changes_since_hash(store, identity.configuration, configuration):
        layers.put(change.key, change.before, "the run")
    return validate_layers(layers)


@contextmanager
def watch_configuration(
    store: ObjectStore, configuration: Configuration, stop: threading.Event, accepted: bool
) -> Generator[None]:
    """Compares with the recorded one at the start, which raises a difference that is not
    `accepted`, and then in a thread. If that finds a difference, or that the run was deleted, it
    sets `stop`, and the error is raised at the end of the block.
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
