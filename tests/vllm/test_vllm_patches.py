"""Deltas in place, as on a GPU: with its packing of matrices switched off vLLM keeps them on the
CPU as it does there. A patched engine serves exactly the bits of a full load.
"""

from collections.abc import Mapping

import pytest
import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.producers.engines.vllm.local import weights
from rollstream.producers.engines.vllm.local.environment import require_vllm
from rollstream.storage.weights.resident import TensorPatch
from rollstream.storage.weights.tensors import untie
from tests.support.engine_samples import V1, V2, chosen_logprobs, half_way, prompt, to_the_end
from tests.vllm.vllm_samples import open_vllm, vllm_model

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own ways to pack, both off."""
    require_vllm()
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)


def open_in_place(family: str) -> VllmEngine:
    engine = open_vllm(vllm_model(family))
    engine._weights._in_place = True  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def drawn_again(
    old: Mapping[str, torch.Tensor], share: float
) -> tuple[dict, tuple[TensorPatch, ...]]:
    """The tensors with a share of the elements of each drawn again, and the patches between
    them.
    """
    kept, tied = untie(old)
    new, patches = {}, []
    for name, tensor in kept.items():
        changed = torch.rand(tensor.numel(), generator=torch.manual_seed(len(patches))) < share
        changed[0] = True
        at = changed.nonzero()[:, 0]
        new[name] = tensor.clone()
        new[name].view(-1)[at] = torch.randn(len(at)) * 0.3
        values = new[name].view(-1)[at]
        patches.append(TensorPatch(name, tuple(tensor.shape), tensor.dtype, at, values))
    return new | {name: new[owner] for name, owner in tied.items()}, tuple(patches)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_patches_in_flight_serve_the_bits_of_the_new_version(family: str) -> None:
    """Several chunks; the tokens after it are those of the new weights."""
    engine = open_in_place(family)
    new, patches = drawn_again(vllm_model(family).state_dict(), 0.05)
    gained = half_way(engine)
    update = engine.prepare(WeightUpdate(V2, new, V1, patches))
    assert update.prepared.patches is not None  # pyright: ignore[reportAttributeAccessIssue]
    engine.update(update, "in_flight_recompute")
    assert engine.read_back(new, new).differing == ()
    mine = to_the_end(engine, gained)
    model = vllm_model(family)
    model.load_state_dict(new)
    wanted = chosen_logprobs(model, prompt(6), mine.tokens)[12:]
    torch.testing.assert_close(torch.tensor(mine.logprobs[12:]), wanted, atol=1e-4, rtol=0)
    assert mine.spans == [(V1, 12), (V2, 28)]


def test_whole_tensors_beside_patches_and_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights.patch_chunks, "__defaults__", (1,))
    engine = open_in_place("qwen3")
    new, patches = drawn_again(vllm_model("qwen3").state_dict(), 0.05)
    whole = ("model.norm.weight", "model.layers.1.self_attn.v_proj.weight")
    rest = tuple(patch for patch in patches if patch.name not in whole)
    engine.update(WeightUpdate(V2, new, V1, rest, whole), "in_flight")
    assert engine.read_back(new, new).differing == ()


def test_patches_of_another_base_load_everything() -> None:
    engine = open_in_place("qwen3")
    new, patches = drawn_again(vllm_model("qwen3", 1).state_dict(), 0.05)
    engine.update(WeightUpdate(V2, new, V2, patches), "in_flight")
    assert engine.read_back(new, new).differing == ()


@pytest.mark.parametrize("fault", ["beyond", "nan"])
def test_a_wrong_patch_is_refused_before_anything_is_written(fault: str) -> None:
    engine = open_in_place("qwen3")
    old = vllm_model("qwen3").state_dict()
    new, patches = drawn_again(old, 0.05)
    bad = patches[3]
    if fault == "beyond":
        bad.indices[-1] = bad.values.new_zeros(bad.shape).numel()
    else:
        bad.values[0] = torch.nan
    with pytest.raises(EngineRefused, match=bad.name):
        engine.prepare(WeightUpdate(V2, new, V1, patches))
    assert engine.read_back(old, old).differing == ()
