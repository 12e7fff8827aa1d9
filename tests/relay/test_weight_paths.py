"""What every way of weights beside the store keeps: a run without one has the plain store; with one
an object is in the store once `settle` returns, and is read although no relay answers.
"""

from pathlib import Path

import pytest

from rollstream.errors import ObjectExists
from rollstream.storage.settings import RelaySettings
from rollstream.storage.weight_paths import (
    PUBLISH_HOOKS,
    WEIGHT_SOURCES,
    PublishHook,
    open_publish_hook,
    open_weight_source,
    settle,
)
from rollstream.storage.weights.manifest import version_folder
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from testbed.memory import MemoryBus, MemoryStore

ON = RelaySettings(enabled=True)
KEY = f"{version_folder(Version(3, 1))}/weights-00001.safetensors"


def test_a_run_without_one_reads_and_writes_the_store_alone(tmp_path: Path) -> None:
    assert open_weight_source(MemoryStore(), RelaySettings(), tmp_path) is None
    assert open_publish_hook(MemoryStore(), MemoryBus(), RelaySettings()) is None
    no_push = RelaySettings(enabled=True, push_bytes_max=0)
    assert open_publish_hook(MemoryStore(), MemoryBus(), no_push) is None
    settle(MemoryStore())  # has nothing to wait for


@pytest.mark.parametrize("name", PUBLISH_HOOKS)
def test_what_a_hook_wrote_is_stored_once_it_has_settled(name: str) -> None:
    bus, store = MemoryBus(), MemoryStore()
    bus.create(catalogue(1))
    hook = open_publish_hook(store, bus, ON)
    assert isinstance(hook, PublishHook), name
    hook.create(KEY, b"tensors")
    settle(hook)
    assert store.get(KEY) == b"tensors"
    with pytest.raises(ObjectExists):
        store.create(KEY, b"others")
    assert hook.metric_values()


@pytest.mark.parametrize("name", WEIGHT_SOURCES)
def test_a_source_reads_the_store_where_its_way_fails(name: str, tmp_path: Path) -> None:
    store = MemoryStore()
    source = open_weight_source(store, ON, tmp_path / "no relay is here")
    assert source is not None, name
    store.create(KEY, b"tensors")
    assert (source.get(KEY), source.get(KEY, 1, 3)) == (b"tensors", b"en")
    source.put("other", b"1")
    assert store.get("other") == b"1"
    assert set(source.metric_values().values()) == {0}
