"""Snapshots: only the memory of released copies is reused."""

import pytest
import torch

from rollstream.consumers.trainer.learn.workers import BufferPool


def weights(value: float) -> dict[str, torch.Tensor]:
    embedding = torch.full((3, 4), value)
    return {"embed": embedding, "count": torch.tensor([2]), "head": embedding}


def test_a_copy_keeps_its_values_until_it_is_released() -> None:
    copies, source = BufferPool(3), weights(1.5)
    first = copies.copy(source, torch.bfloat16)
    source["embed"].fill_(7)
    second = copies.copy(source, torch.bfloat16)
    assert bool((first["embed"] == 1.5).all())
    assert bool((second["embed"] == 7).all())
    copies.release(first)
    third = copies.copy(weights(9.0), torch.bfloat16)
    assert third["embed"].data_ptr() == first["embed"].data_ptr()
    assert bool((second["embed"] == 7).all())
    assert copies.in_use == 2


def test_dtypes_and_tied_names_are_those_of_the_published_version() -> None:
    copies = BufferPool(2)
    for _ in range(2):  # fresh memory, then memory that was used before
        copy = copies.copy(weights(0.1), torch.bfloat16)
        assert copy["embed"].dtype == torch.bfloat16
        assert copy["count"].dtype == torch.int64
        assert copy["head"].data_ptr() == copy["embed"].data_ptr()
        copies.release(copy)


def test_another_layout_gets_memory_of_its_own() -> None:
    copies = BufferPool(1)
    copies.release(copies.copy(weights(1.0), None))
    grown = copies.copy({"embed": torch.ones(5, 4), "new": torch.zeros(2)}, None)
    assert grown.keys() == {"embed", "new"}
    assert grown["embed"].shape == (5, 4)


def test_copies_are_bounded_and_foreign_copies_are_not_released() -> None:
    copies = BufferPool(1)
    first = copies.copy(weights(1.0), None)
    copies.release(dict(first))
    assert copies.in_use == 1
    with pytest.raises(AssertionError, match="not released"):
        copies.copy(weights(1.0), None)
    copies.release(first)
    copies.release(first)
    assert copies.in_use == 0
