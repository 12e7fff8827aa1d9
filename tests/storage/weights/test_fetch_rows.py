"""Rows of one tensor directly from the store, for a tensor-parallel rank."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.storage.weights.fetch import fetch_rows
from rollstream.storage.weights.manifest import manifest_key
from tests.storage.weights.test_delta_versions import CountingStore, flip
from tests.storage.weights.version_samples import History, changed


@pytest.fixture(scope="module")
def history():
    made = History(store=CountingStore(), tensors=large())
    for number in range(1, 4):
        made.add(anchor=number == 2)
    tensors = changed(made.tensors[-1], 4)
    tensors["w"] = torch.randn(64, 100)  # every element: dense
    made.add(tensors)
    made.add()
    return made


def large():
    embed = torch.randn(300, 40).to(torch.bfloat16)
    return {"embed": embed, "head": embed, "w": torch.randn(64, 100), "v": torch.arange(7)}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rows_of_any_version_are_those_of_the_whole_tensor(history, data):
    number = data.draw(st.integers(0, 5))
    name = data.draw(st.sampled_from(["embed", "head", "w", "v"]))
    whole = history.tensors[number][name]
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    got = fetch_rows(history.store, history.version(number), name, start, stop)
    assert (got.dtype, got.shape) == (whole.dtype, whole[start:stop].shape)
    assert torch.equal(got, whole[start:stop])
    got.zero_()  # the caller's own array
    assert torch.equal(
        fetch_rows(history.store, history.version(number), name, 0, len(whole)), whole
    )


def test_a_rank_reads_its_rows_of_the_anchor_and_the_payloads_since(history):
    history.store.bytes_read = 0
    fetch_rows(history.store, history.version(0), "w", 16, 32)
    assert history.store.bytes_read == 16 * 100 * 4
    history.store.bytes_read = 0
    fetch_rows(history.store, history.version(1), "w", 16, 32)
    payload = history.manifests[1].delta.tensors["w"].bytes
    assert history.store.bytes_read == 16 * 100 * 4 + payload


def test_a_damaged_payload_or_manifest_and_an_unknown_tensor_are_refused():
    made = History(tensors=large())
    flip(made.store, made.add(), "w")
    with pytest.raises(CorruptObject, match="tensor w in object"):
        fetch_rows(made.store, made.version(1), "w", 0, 3)
    with pytest.raises(ObjectMissing, match="no tensor z"):
        fetch_rows(made.store, made.version(1), "z", 0, 3)
    with pytest.raises(CorruptObject, match="announced"):
        fetch_rows(made.store, made.version(1), "v", 0, 3, manifest_hash="0" * 32)
    made.store.delete(manifest_key(made.version(0)))
    with pytest.raises(ObjectMissing, match=r"tensor v"):
        fetch_rows(made.store, made.version(1), "v", 0, 3)
