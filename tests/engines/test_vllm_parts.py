"""The parts of the vLLM engine that need no vLLM: installation advice, checkpoint contents, chunks,
shared memory, seeds. The engine itself: tests/vllm.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from itertools import islice

import pytest
import torch

from rollstream.errors import ConfigurationError, EngineRefused
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.vllm.engine import VllmSequence
from rollstream.producers.engines.vllm.local import environment
from rollstream.producers.engines.vllm.local.parameter_map import expected_tensors
from rollstream.producers.engines.vllm.local.staging import (
    StagedChunks,
    StagedMessage,
    read_staged_patches,
    stage_patches,
    stage_tensors,
    staged_tensors,
)
from rollstream.producers.engines.vllm.local.weights import check_update, patch_chunks, whole_chunks
from rollstream.storage.weights.resident import TensorPatch
from rollstream.streams.values import Sampling
from tests.support.engine_samples import V1, V2, Gained, ask, prompt, resumed, tiny_model

READ = """
import sys, json
from rollstream.producers.engines.vllm.local.staging import staged_tensors
((name, tensor),) = staged_tensors(sys.argv[1], json.loads(sys.argv[2]))
print(name, tensor.dtype, tensor.tolist())
"""


def changed(name: str, tensor: torch.Tensor, at: list[int]) -> TensorPatch:
    indices = torch.tensor(at)
    return TensorPatch(
        name, tuple(tensor.shape), tensor.dtype, indices, tensor.reshape(-1)[indices]
    )


def missing(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("found", "expected"), [(missing, "make vllm"), (lambda _: "0.99.1", "0.99")]
)
def test_a_missing_vllm_or_another_release_is_refused_with_what_to_install(
    found: object, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "version", found)
    model = tiny_model("llama")
    with pytest.raises(ConfigurationError, match=expected):
        open_engine(
            "vllm", model.config, model.state_dict(), V1, EngineOptions(slots=2, context_max=64)
        )


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_checkpoint_needs_each_memory_once_under_any_of_its_names(family: str) -> None:
    model = tiny_model(family)
    needed, state = expected_tensors(model.config), dict(model.state_dict())
    assert set(needed.own(state)) == set(needed.shapes)
    for name, others in needed.tied.items():
        del state[name]
        assert others[0] in state
    assert set(needed.own(state)) == set(needed.shapes)


def test_patches_count_only_where_they_can_be_written_in_place_on_their_base() -> None:
    model = tiny_model("qwen2")
    needed, state = expected_tensors(model.config), dict(model.state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    update = WeightUpdate(
        V2, state, V1, (changed(name, state[name], [0, 5]),), ("model.norm.weight",)
    )
    patches = check_update(update, needed, V1, in_place=True).patches
    assert patches is not None
    assert [patch.name for patch in patches] == [name, "model.norm.weight"]
    assert len(patches[1].indices) == state["model.norm.weight"].numel()
    assert check_update(update, needed, V2, in_place=True).patches is None
    assert check_update(update, needed, V1, in_place=False).patches is None
    mostly = WeightUpdate(V2, state, V1, (), tuple(state))
    assert check_update(mostly, needed, V1, in_place=True).patches is None


def test_a_wrong_tensor_is_named_before_anything_is_loaded() -> None:
    model = tiny_model("qwen2")
    needed, state = expected_tensors(model.config), dict(model.state_dict())
    del state["model.norm.weight"]
    with pytest.raises(EngineRefused, match=r"model\.norm\.weight"):
        check_update(WeightUpdate(V2, state), needed, None, in_place=False)


@pytest.mark.parametrize("bytes_max", [1, 4096, 20_000, 1 << 20])
def test_chunks_hold_everything_in_order_and_little_more_than_asked(bytes_max: int) -> None:
    model = tiny_model("llama")
    needed, state = expected_tensors(model.config), dict(model.state_dict())
    cut = list(whole_chunks(needed, state, bytes_max))
    assert [name for chunk in cut for name, _ in chunk] == list(needed.shapes)
    for chunk in cut:
        assert len(chunk) == 1 or sum(tensor.nbytes for _, tensor in chunk) <= bytes_max
    patches = [changed(name, state[name], [0]) for name in needed.shapes]
    assert [p for some in patch_chunks(patches, bytes_max) for p in some] == patches


def test_staged_tensors_are_the_same_in_another_process_and_go_with_their_owner() -> None:
    file = stage_tensors([("odd", torch.tensor([[1.5, -0.0]], dtype=torch.bfloat16))]).file
    line = [sys.executable, "-c", READ, file.path, json.dumps(file.entries)]
    read = subprocess.run(line, capture_output=True, text=True, check=True)
    assert read.stdout == "odd torch.bfloat16 [[1.5, -0.0]]\n"
    path = file.path
    file.close()
    assert not os.path.exists(path)


def test_at_most_two_chunks_of_an_update_are_staged_and_each_is_given_once() -> None:
    staged: list[StagedMessage] = []

    def stage() -> Iterator[StagedMessage]:
        for number in range(7):
            staged.append(stage_tensors([(f"t{number}", torch.tensor([number]))]))
            yield staged[-1]

    def is_open(one: StagedMessage) -> bool:
        file = one.file._file  # pyright: ignore[reportPrivateUsage]
        return file is not None and not file.closed

    chunks = StagedChunks(stage())
    assert (len(staged), chunks.is_used) == (2, False)  # beside decoding
    loaded: list[int] = []
    for message in chunks.messages():
        ((_, tensor),) = staged_tensors(**message)
        loaded.append(int(tensor))
        assert sum(map(is_open, staged)) <= 2
    assert (loaded, chunks.is_used) == (list(range(7)), True)
    assert not any(map(is_open, staged))


def test_an_error_in_staging_a_later_chunk_is_one_of_the_load() -> None:
    def stage() -> Iterator[StagedMessage]:
        for number in range(3):
            yield stage_tensors([(f"t{number}", torch.tensor([number]))])
        raise OSError("no shared memory is left")

    messages = StagedChunks(stage()).messages()
    assert [message["entries"][0]["name"] for message in islice(messages, 3)] == ["t0", "t1", "t2"]
    with pytest.raises(OSError, match="no shared memory"):
        next(messages)


def test_staged_patches_come_out_as_they_went_in() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    patches = [changed("a", tensor, [1, 7]), changed("b", -tensor, [0])]
    staged = stage_patches(patches)
    back = read_staged_patches(**staged.message)
    for one, other in zip(patches, back, strict=True):
        assert (one.name, one.shape, one.dtype) == (other.name, other.shape, other.dtype)
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.values, other.values)
    assert staged_tensors(staged.file.path, []) == []


def test_a_moved_trajectory_is_seeded_by_what_it_has_and_nothing_else() -> None:
    """Invariant 10: independent of where and how often it moved."""
    request = ask("t", prompt(6), Sampling(tokens_max=30))
    one, other = VllmSequence(request, 96), VllmSequence(request, 96)
    one.enter("t/1")
    one.gain([3, 4], [-1.0, -2.0])
    tokens, _, _ = one.take(V1)
    moved = resumed(request, Gained([3, 4], [-1.0, -2.0]))
    assert tokens.tolist() == [3, 4]
    assert VllmSequence(moved, 96).seed == one.seed != other.seed
    assert VllmSequence(ask("u", prompt(6), Sampling()), 96).seed != other.seed
    assert (one.room, other.room) == (28, 30)


def test_stamps_tile_the_stay_in_vllm() -> None:
    """Invariant 3."""
    sequence = VllmSequence(ask("t", prompt(6), Sampling()), 96)
    sequence.enter("t/1")
    sequence.gain([1, 2], [-1.0, -1.0])
    sequence.take(V1)
    sequence.gain([3], [-1.0])
    assert sequence.stamps(V2) == ((str(V1), 0), (str(V2), 2))
    sequence.take(V2)
    sequence.enter("t/2")
    sequence.gain([4], [-1.0])
    assert sequence.stamps(V2) == ((str(V2), 0),)
