"""The relation of a fork to its parent: its place, the prompts left for it, and the loss of a run
whose log is lost.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollstream.consumers.dispatch.persistence import STATE_KEY, PersistedState
from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.look.query.permissions import folder_of_url
from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_folder import RunFolder, bus_url, store_url
from rollstream.run.config.sources import SettingLayers
from rollstream.storage.identity import IDENTITY_KEY, read_identity
from rollstream.storage.stored_settings import recorded_settings
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import create_idempotent, decode_json, encode_json
from rollstream.storage.stores.read_only import open_store_for_reading
from rollstream.storage.stores.run_keys import RunKeys
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import StepDone

PARENTAGE_KEY = "forked_from.json"
RUN_KEYS = (RunKeys(re.compile(re.escape(PARENTAGE_KEY)), "cut", "any"),)


@dataclass(frozen=True, slots=True)
class PromptsLeft:
    """Groups that a fork generates, by their numbers in the task's order: those in `again`, then
    all from `on` up; by default all.
    """

    again: tuple[int, ...] = ()
    """Groups below `on` that had not ended at the fork's step, ascending."""
    on: int = 0

    def first(self) -> int:
        return min((*self.again, self.on))

    def __contains__(self, group: int) -> bool:
        return group >= self.on or group in self.again


@dataclass(frozen=True, slots=True)
class Parentage:
    """The parentage of a fork: the run and checkpoint at which it began, and its
    changed settings.
    """

    run: str
    folder: str
    """Of the parent, or URL of its store if only that was left."""
    checkpoint: str
    step: int
    state_hash: str
    """Of fp32 weights and optimiser in the parent's ledger for that step."""
    prompts: PromptsLeft
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    """Setting → its value in the parent and in the fork."""

    def __str__(self) -> str:
        return f"{self.run} at step {self.step}"


def read_parentage(store: ObjectStore) -> Parentage | None:
    """Returns None if the run is no fork."""
    try:
        return decode_json(store.get(PARENTAGE_KEY), Parentage, PARENTAGE_KEY)
    except ObjectMissing:
        return None


def write_parentage(store: ObjectStore, parentage: Parentage) -> None:
    """Idempotent; raises `StoreError` if a different one is stored."""
    create_idempotent(store, PARENTAGE_KEY, encode_json(parentage))


def prompts_left(
    had: PromptsLeft,
    following: int,
    opened: Collection[int],
    ended: Collection[int],
    later: Collection[int],
) -> PromptsLeft:
    """The parent's groups that had not ended at the checkpoint's step. Pure.

    `had` are the groups that the parent itself began with. Of the groups below `following`, whose
    admissions the checkpoint's trainer had read, `opened` were open and the others had ended.
    `ended` had ended before their admissions were read. `later` ended in a step after the
    checkpoint's, so for the fork they have not.
    """
    done = set(ended) - set(later)
    on = max((following, had.on, *(group + 1 for group in done)))
    unread = {group for group in had.again if group >= following}
    unread |= set(range(max(following, had.on), on))
    unended = ({*opened, *later} | unread) - done
    return PromptsLeft(tuple(sorted(g for g in unended if g < on and g in had)), on)


@dataclass(frozen=True, slots=True)
class ForkParent:
    """A forked run, or only its store if log and folder are lost."""

    where: str
    run: str
    settings: Path
    folder: RunFolder | None
    """None if only the store is left."""
    store: str
    bus: str | None
    """URL; None if only the store is left."""


def parent_of_folder(folder: RunFolder) -> ForkParent:
    c = load_for_viewing(folder.configuration)
    urls = store_url(c, folder.path), bus_url(c, folder.path)
    return ForkParent(str(folder.path), c.run, folder.configuration, folder, *urls)


def parent_of_store(url: str, settings: Path) -> ForkParent:
    """Raises `ConfigurationError` if the store at `url` holds no run that was trained. Its settings
    are written to the file `settings`.
    """
    values = recorded_configuration(url)
    # A fork with these settings keeps log and store in its own folder.
    own_urls = {"bus": "sqlite:bus", "store": "file:store"}
    settings.write_text(json.dumps(values | own_urls), encoding="utf-8")
    return ForkParent(url, values["run"], settings, None, url, None)


def recorded_configuration(url: str) -> dict[str, Any]:
    """Returns the recorded configuration from the store at `url`, as nested tables. Raises
    `ConfigurationError` if it holds no run that was trained.
    """
    folder = folder_of_url(url)
    store = open_store_for_reading(url, None if folder is None else ContainedFolder(folder))
    identity = read_identity(store)
    if identity is None or not identity.configuration:
        raise ConfigurationError(
            f"{url} holds no run that was trained (no {IDENTITY_KEY} names it)"
        )
    layers = SettingLayers()
    for key, value in recorded_settings(store, identity.configuration).items():
        layers.put(key, value, url)
    return layers.values


@dataclass(frozen=True, slots=True)
class RecoveryPoint:
    """Where a fork continues a run whose log is lost, and the loss: later steps, and records after
    the archive's last file (of at most `archive.roll_s` seconds).
    """

    step: int
    """Of the fork's first checkpoint."""
    reached: int
    """Newest finished step, by believed version or archive."""
    archived_step: int
    """The last whose `StepDone` is in the archive."""
    archived_records: int
    """Trajectories, admissions and records of the ledger."""
    admitted_since: int
    """Groups that are generated again; dispatch may have admitted more after it last stored its
    state.
    """


def recovery_point(
    store: ObjectStore, log: Bus, step: int, left_prompts: PromptsLeft
) -> RecoveryPoint:
    """Returns the recovery point of a run of which the store is left, with its archive as `log`."""
    pointer, archived = believed_pointer(store), 0
    for received in TopicReader(log, "ledger", from_begin(log, "ledger")).read_to(
        log.end("ledger")
    ):
        if isinstance(received.record, StepDone):
            archived = max(archived, received.record.step)
    reached = pointer.version.number if pointer and pointer.version else step
    records = sum(
        sum(log.end(topic).values()) for topic in ("trajectories", "admissions", "ledger")
    )
    try:
        dispatch = decode_json(store.get(STATE_KEY), PersistedState, STATE_KEY).next_group
    except ObjectMissing:
        dispatch = left_prompts.on
    since = max(0, dispatch - left_prompts.on) + len(left_prompts.again)
    return RecoveryPoint(step, max(reached, archived), archived, records, since)
