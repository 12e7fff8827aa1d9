"""Invariant 14 in the store: an object of a newer format is refused, never taken for damaged."""

import json

import pytest
import torch

from rollstream.consumers.dispatch.persistence import (
    PersistedState,
    StateFile,
    read_persisted_state,
)
from rollstream.errors import NewerRelease
from rollstream.storage.leases import LeaseCandidate, LeaseClaim
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import decode_json, encode_json, seal
from rollstream.storage.terms import next_term, read_role, role_key
from rollstream.storage.weights.checkpoints import newest_checkpoint, write_checkpoint
from rollstream.storage.weights.manifest import Manifest, manifest_key, read_manifest
from rollstream.storage.weights.pointer import POINTER_KEY, read_pointer, take_pointer
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.storage.weights.retention import stored_versions
from rollstream.streams.records import Position
from rollstream.streams.release import RELEASE
from rollstream.streams.values import Version
from testbed.memory import MemoryStore

V0 = Version(0, 1)


@pytest.fixture
def store() -> ObjectStore:
    return MemoryStore()


def renumbered(store: ObjectStore, key: str, number: int | None) -> None:
    """The object with another format number, or without one."""
    value = json.loads(store.get(key))
    body = value.get("body", value)
    body.pop("format", None)
    if number is not None:
        body["format"] = number
    store.put(key, seal(body) if "body" in value else encode_json(value))


def checkpoint(store: ObjectStore, step: int) -> str:
    return f"{write_checkpoint(store, step, 1, {'w': torch.zeros(2)}, {}).folder}/manifest.json"


def version(store: ObjectStore) -> Manifest:
    return publish_version(store, NewVersion("run", V0, {"w": torch.zeros(2)}, {}, 1 << 20, 0.0))


def test_a_newer_checkpoint_is_refused_and_no_older_one_is_taken(store: ObjectStore) -> None:
    checkpoint(store, 1)
    renumbered(store, checkpoint(store, 2), 3)
    with pytest.raises(NewerRelease, match=rf"s00000002-t0001.* format 3.*rollstream {RELEASE}"):
        newest_checkpoint(store)


def test_a_newer_manifest_is_refused_by_readers_and_by_retention(store: ObjectStore) -> None:
    version(store)
    renumbered(store, manifest_key(V0), 2)
    with pytest.raises(NewerRelease, match="format 2"):
        read_manifest(store, V0)
    with pytest.raises(NewerRelease, match="format 2"):
        stored_versions(store)


def test_what_dispatch_kept_in_a_newer_form_is_refused_and_stays(store: ObjectStore) -> None:
    StateFile(store, 1).take_over()
    renumbered(store, "dispatch/state.json", 2)
    before = store.get("dispatch/state.json")
    with pytest.raises(NewerRelease):
        StateFile(store, 2).take_over()
    with pytest.raises(NewerRelease):
        read_persisted_state(store)
    assert store.get("dispatch/state.json") == before


def test_leases_terms_and_the_pointer_have_forms_too(store: ObjectStore) -> None:
    assert LeaseClaim(store, LeaseCandidate("trainer", "here", "nonce")).attempt() is not None
    take_pointer(store, "run", 1)
    next_term(store, "rollouts", "one")
    for key in (role_key("trainer"), POINTER_KEY, "roles/rollouts/one.json"):
        renumbered(store, key, 2)
    with pytest.raises(NewerRelease):
        read_role(store, "trainer")
    with pytest.raises(NewerRelease):
        read_pointer(store)
    with pytest.raises(NewerRelease):
        next_term(store, "rollouts", "one")


def test_an_object_without_a_number_has_the_first_form(store: ObjectStore) -> None:
    """As 0.1.0 wrote it; the hash under which a version is announced is unchanged."""
    key = checkpoint(store, 1)
    renumbered(store, key, None)
    assert newest_checkpoint(store).checkpoint is not None
    version(store)
    renumbered(store, manifest_key(V0), None)
    assert read_manifest(store, V0, read_manifest(store, V0).hash).version == V0
    store.create(
        "dispatch/state.json", encode_json(PersistedState(1, {"ledger": {"0": Position(3)}}))
    )
    renumbered(store, "dispatch/state.json", None)
    assert StateFile(store, 2).take_over() is not None


def test_what_is_written_here_carries_its_number(store: ObjectStore) -> None:
    StateFile(store, 1).take_over()
    assert json.loads(store.get("dispatch/state.json"))["format"] == 1
    assert json.loads(store.get(checkpoint(store, 1)))["body"]["format"] == 1
    assert version(store).hash == read_manifest(store, V0).hash
    assert json.loads(store.get(manifest_key(V0)))["format"] == 1


def test_damage_stays_damage(store: ObjectStore) -> None:
    checkpoint(store, 1)
    key = checkpoint(store, 2)
    store.put(key, store.get(key)[:-3])
    restored = newest_checkpoint(store)
    assert restored.checkpoint is not None
    assert restored.checkpoint.id.step == 1
    assert decode_json(b"{}", dict[str, int], "x") == {}
