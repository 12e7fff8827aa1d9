"""Finds the parent of a fork by its folder or its store, and keeps the `Parentage` that a fork
records in its own store for the report, `checkpoints show` and forks of the fork
(docs/reference/fork.md).
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollstream.config.config import load_for_viewing, recorded_settings
from rollstream.config.identity import IDENTITY_KEY, read_identity
from rollstream.config.run_folder import RunFolder, bus_url, store_url
from rollstream.config.sources import SettingLayers
from rollstream.consumers.dispatch.persistence import STATE_KEY, PersistedState
from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.json_objects import create_idempotent, decode_json, encode_json
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import StepDone

PARENTAGE_KEY = "forked_from.json"


@dataclass(frozen=True, slots=True)
class PromptsLeft:
    """Names the groups of the task's order that are still to be used: those in `again`, then all
    groups from number `on` up.
    """

    again: tuple[int, ...] = ()
    """Groups below `on` that the parent admitted and did not finish."""
    on: int = 0

    def first(self) -> int:
        return min((*self.again, self.on))

    def __contains__(self, group: int) -> bool:
        return group >= self.on or group in self.again


@dataclass(frozen=True, slots=True)
class Parentage:
    """States the run and checkpoint that a fork started from, and the settings that it changed
    (before, now).
    """

    run: str
    folder: str
    checkpoint: str
    step: int
    state_hash: str
    """The hash of masters and optimiser, as the parent's ledger has it for that step."""
    prompts: PromptsLeft
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])

    def __str__(self) -> str:
        return f"{self.run} at step {self.step}"


def read_parentage(store: ObjectStore) -> Parentage | None:
    """Returns the run's parentage; None if the run is no fork."""
    try:
        return decode_json(store.get(PARENTAGE_KEY), Parentage, PARENTAGE_KEY)
    except ObjectMissing:
        return None


def write_parentage(store: ObjectStore, parentage: Parentage) -> None:
    """Store the parentage. Idempotent; raises `StoreError` if another one is stored."""
    create_idempotent(store, PARENTAGE_KEY, encode_json(parentage))


def prompts_left(
    had: PromptsLeft,
    following: int,
    opened: Collection[int],
    ended: Collection[int],
    later: Collection[int],
) -> PromptsLeft:
    """Returns the parent's prompts whose groups had not ended at the checkpoint's step, without
    I/O.

    `had` are the prompts that the parent itself began with. `following` is the first group whose
    admission the trainer had not read; `opened` are the open groups below it, `ended` the groups
    from it up that had ended nevertheless, `later` the groups that the ledger ends in a later step.
    """
    done = set(ended) - set(later)
    on = max((following, had.on, *(group + 1 for group in done)))
    unread = {group for group in had.again if group >= following}
    unread |= set(range(max(following, had.on), on))
    left = ({*opened, *later} | unread) - done
    return PromptsLeft(tuple(sorted(g for g in left if g < on and g in had)), on)


@dataclass(frozen=True, slots=True)
class ForkParent:
    """Locates the run that is forked. `where` is its name in messages; `folder` is None if only its
    store is left; `settings` is the file of its configuration, `bus` the URL of its log if known.
    """

    where: str
    run: str
    settings: Path
    folder: RunFolder | None
    store: str
    bus: str | None


def parent_of_folder(folder: RunFolder) -> ForkParent:
    """Returns the run in this folder as the parent of a fork."""
    c = load_for_viewing(folder.configuration)
    urls = store_url(c, folder.path), bus_url(c, folder.path)
    return ForkParent(str(folder.path), c.run, folder.configuration, folder, *urls)


def parent_of_store(url: str, settings: Path) -> ForkParent:
    """Returns the run in the store at `url` as the parent of a fork, for a run of which only the
    store is left. The function writes the settings that its trainer recorded there to the file
    `settings`; log and store of the fork are inside its folder unless they are set.

    Raises `ConfigurationError` if the store holds no run that was trained.
    """
    values = recorded_configuration(url)
    own = {"bus": "sqlite:bus", "store": "file:store"}
    settings.write_text(json.dumps(values | own), encoding="utf-8")
    return ForkParent(url, values["run"], settings, None, url, None)


def recorded_configuration(url: str) -> dict[str, Any]:
    """Returns the settings that a trainer recorded in the store at `url`, as nested tables. Raises
    `ConfigurationError` if the store holds no run that was trained.
    """
    store = open_store(url)
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
    """States the step at which a fork recovers a run whose log is lost, and the losses.

    `reached` is the newest version that the run believed. `archived_step` is the last step whose
    `StepDone` the archive holds; records that followed the archive's last file, of at most
    `archive.roll_s` seconds, are lost.
    """

    step: int
    reached: int
    archived_step: int
    archived_records: int
    admitted_since: int
    """The least number of groups that dispatch had admitted and that are generated again."""


def recovery_point(store: ObjectStore, log: Bus, step: int, left: PromptsLeft) -> RecoveryPoint:
    """Returns the recovery point of a run whose store and archive (read as `log`) are left; the
    fork begins at the checkpoint of `step` with the prompts `left`.
    """
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
        dispatch = left.on
    since = max(0, dispatch - left.on) + len(left.again)
    return RecoveryPoint(step, max(reached, archived), archived, records, since)
