"""In-place deltas: a patched engine serves exactly the bits of a full load of the same tensors, and
nothing is written before everything was checked.
"""

import dataclasses
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.engines.torch.weights import CollectedWrite, PreparedWrites
from rollstream.storage.weights.resident import TensorPatch
from rollstream.storage.weights.tensors import untie
from rollstream.streams.values import Sampling, Version
from tests.support.engine_samples import (
    FAMILIES,
    SIZES,
    V1,
    V2,
    ask,
    open_torch,
    prompt,
    run_all,
    tiny_model,
)

V3 = Version(3, 1)
MORE = {
    "qwen3_untied": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False, attention_bias=True)
    ),
    "llama_plain": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
}
ALL = sorted({**FAMILIES, **MORE})
WIRES = (torch.bfloat16, torch.float32)
Tensors = dict[str, torch.Tensor]


def model_of(family: str) -> PreTrainedModel:
    if family not in MORE:
        return tiny_model(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MORE[family]().eval().requires_grad_(False)


def as_wire(model: PreTrainedModel, wire: torch.dtype) -> Tensors:
    """Tensors with memory of their own, as a version holds them: tied names share one."""
    kept, tied = untie(model.state_dict())
    mine = {name: tensor.to(wire, copy=True) for name, tensor in kept.items()}
    return mine | {name: mine[owner] for name, owner in tied.items()}


def copied(tensors: Tensors) -> Tensors:
    kept, tied = untie(tensors)
    mine = {name: tensor.clone() for name, tensor in kept.items()}
    return mine | {name: mine[owner] for name, owner in tied.items()}


def changed(tensors: Tensors, shares: dict[str, float], seed: int = 0) -> Tensors:
    """The tensors with this share of the elements of these (by name) drawn again."""
    new, draw = copied(tensors), np.random.default_rng(seed)
    for name, share in shares.items():
        flat = new[name].view(-1)
        count = min(flat.numel(), max(1, int(share * flat.numel())))
        at = torch.from_numpy(draw.choice(flat.numel(), count, replace=False))
        flat[at] = torch.from_numpy(draw.normal(0, 1, count)).to(flat.dtype)
    return new


def delta(old: Tensors, new: Tensors, whole: tuple[str, ...] = ()) -> WeightUpdate:
    """The update that contains exactly the differences."""
    patches = []
    for name, tensor in untie(new)[0].items():
        differs = (tensor.view(-1).view(torch.uint8) != old[name].view(-1).view(torch.uint8)).view(
            tensor.numel(), -1
        )
        at = differs.any(1).nonzero()[:, 0]
        if name not in whole and len(at):
            values = tensor.view(-1)[at]
            patches.append(TensorPatch(name, tuple(tensor.shape), tensor.dtype, at, values))
    return WeightUpdate(V2, new, V1, tuple(patches), whole)


def engine_of(
    config: PreTrainedConfig, tensors: Tensors, dtype: torch.dtype = torch.float32
) -> TorchEngine:
    return TorchEngine(config, tensors, V1, EngineOptions(2, 64), dtype=dtype)


def assert_same_bits(patched: TorchEngine, loaded: TorchEngine) -> None:
    other = loaded._decoder.served.views
    for name, group in patched._decoder.served.views.items():
        for mine, theirs in zip(group, other[name], strict=True):
            assert torch.equal(
                mine.view.contiguous().view(torch.uint8), theirs.view.contiguous().view(torch.uint8)
            ), name


@pytest.mark.parametrize(("family", "wire"), zip(ALL, cycle(WIRES), strict=False))
def test_every_tensor_patched_alone_equals_a_full_load(family: str, wire: torch.dtype) -> None:
    model = model_of(family)
    old = as_wire(model, wire)
    for number, name in enumerate(untie(old)[0]):
        new = changed(old, {name: 0.1}, number)
        engine = engine_of(model.config, old)
        engine.update(engine.prepare(delta(old, new)), "in_flight")
        assert_same_bits(engine, engine_of(model.config, new))
        assert engine.version == V2
        assert engine.read_back(new, new).differing == ()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_patches_equal_a_full_load(data: st.DataObject) -> None:
    model = model_of(data.draw(st.sampled_from(ALL)))
    wire = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    old = as_wire(model, wire)
    names = list(untie(old)[0])
    some = data.draw(st.lists(st.sampled_from(names), max_size=8, unique=True))
    shares = {name: data.draw(st.sampled_from([0.001, 0.05, 0.5, 1.0])) for name in some}
    new = changed(old, shares, data.draw(st.integers(0, 99)))
    whole = tuple(name for name in some if data.draw(st.integers(0, 3)) == 0)
    engine = engine_of(model.config, old, dtype)
    engine.update(delta(old, new, whole), "in_flight")
    assert_same_bits(engine, engine_of(model.config, new, dtype))


@pytest.mark.parametrize("family", ["qwen3", "llama_plain", "gpt2"])
def test_patches_are_what_is_written_and_not_a_load(family: str) -> None:
    """Elements outside of the patches keep even values that the test wrote past the engine."""
    model = model_of(family)
    old = as_wire(model, torch.bfloat16)
    name = next(name for name in old if "mlp" in name and name.endswith("weight"))
    new = changed(old, {name: 0.01})
    engine = engine_of(model.config, old)
    untouched = next(n for n in engine._decoder.served.views if "mlp" not in n and "weight" in n)
    engine._decoder.served.views[untouched][0].view.fill_(7)
    engine.update(engine.prepare(delta(old, new)), "in_flight")
    assert bool((engine._decoder.served.views[untouched][0].view == 7).all())


def test_a_patch_from_another_base_is_not_used() -> None:
    model = model_of("qwen3")
    old = as_wire(model, torch.bfloat16)
    middle = changed(old, {"model.layers.0.mlp.up_proj.weight": 0.2}, 1)
    new = changed(middle, {"model.layers.1.mlp.up_proj.weight": 0.2}, 2)
    engine = engine_of(model.config, old)
    step = dataclasses.replace(delta(middle, new), version=V3, base=V2)
    engine.update(step, "in_flight")
    assert_same_bits(engine, engine_of(model.config, new))
    assert engine.version == V3


def test_an_update_prepared_for_a_base_that_is_gone_is_loaded() -> None:
    model = model_of("llama_plain")
    old = as_wire(model, torch.bfloat16)
    new = changed(old, {"model.layers.0.mlp.up_proj.weight": 0.2}, 1)
    engine = engine_of(model.config, old)
    prepared = dataclasses.replace(engine.prepare(delta(old, new)), version=V3)
    engine.update(WeightUpdate(V2, changed(old, {"model.norm.weight": 1.0})), "in_flight")
    engine.update(prepared, "in_flight")
    assert_same_bits(engine, engine_of(model.config, new))


def faulty(patch: TensorPatch, fault: str) -> TensorPatch:
    if fault == "nan":
        return dataclasses.replace(patch, values=patch.values * torch.nan)
    if fault == "shape":
        return dataclasses.replace(patch, shape=(*patch.shape, 1))
    if fault == "count":
        return dataclasses.replace(patch, values=patch.values[:-1])
    at = patch.indices.clone()
    at[-1 if fault == "beyond" else 0] = 10**9 if fault == "beyond" else -1
    return dataclasses.replace(patch, indices=at)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("fault", ["nan", "shape", "count", "beyond", "negative"])
def test_a_wrong_patch_is_refused_before_anything_is_written(family: str, fault: str) -> None:
    model = model_of(family)
    old = as_wire(model, torch.bfloat16)
    names = [name for name in untie(old)[0] if "mlp" in name and name.endswith("weight")]
    new = changed(old, dict.fromkeys(names[:2], 0.1))
    update = delta(old, new)
    bad = dataclasses.replace(update, patches=(update.patches[0], faulty(update.patches[1], fault)))  # pyright: ignore[reportOptionalSubscript]
    engine = engine_of(model.config, old)
    with pytest.raises(EngineRefused, match=update.patches[1].name):  # pyright: ignore[reportOptionalSubscript]
        engine.prepare(bad)
    with pytest.raises(EngineRefused, match=update.patches[1].name):  # pyright: ignore[reportOptionalSubscript]
        engine.update(bad, "in_flight")
    assert_same_bits(engine, engine_of(model.config, old))
    engine.submit(ask("t", prompt(4), Sampling(tokens_max=4)))
    assert engine.poll(0.1) == []
    engine.update(WeightUpdate(V2, new), "in_flight")
    assert run_all(engine)["t"].spans == [(V2, 4)]


def test_a_failure_in_the_middle_serves_nothing_and_is_no_base_for_patches() -> None:
    model = model_of("qwen3")
    old = as_wire(model, torch.bfloat16)
    new = changed(old, {"model.layers.0.mlp.up_proj.weight": 0.2})
    engine = engine_of(model.config, old)
    engine.submit(ask("t", prompt(4), Sampling(tokens_max=4)))
    update = engine.prepare(delta(old, new))
    good = update.prepared
    assert isinstance(good, PreparedWrites)
    broken = CollectedWrite(torch.zeros(3), torch.arange(9), torch.zeros(9))
    halted = PreparedWrites(good.base, (*good.writes, broken))  # pyright: ignore[reportOptionalIterable]
    with pytest.raises((IndexError, RuntimeError)):
        engine.update(dataclasses.replace(update, prepared=halted), "in_flight")
    assert engine.poll(0.1) == []
    again = engine.prepare(delta(old, new)).prepared
    assert isinstance(again, PreparedWrites)
    assert again.writes is None, "what was half written is loaded whole"
    engine.update(delta(old, new), "in_flight")
    assert_same_bits(engine, engine_of(model.config, new))
    assert run_all(engine)["t"].spans == [(V2, 4)]


@pytest.mark.parametrize("family", ALL)
def test_reading_back_names_what_is_not_served_as_given(family: str) -> None:
    """Every tensor in turn, norms that are multiplied into others included; one bit is enough."""
    model = model_of(family)
    old = as_wire(model, torch.bfloat16)
    engine = engine_of(model.config, old)
    everything = engine.read_back(old, old)
    assert everything.differing == ()
    assert everything.count == len(untie(old)[0])
    for name in untie(old)[0]:
        other = changed(old, {name: 1.0}, 3)
        assert name in engine.read_back([name], other).differing
    name = next(n for n in engine._decoder.served.views if n.endswith("weight"))
    flat = engine._decoder.served.views[name][0].view
    flat[(0,) * flat.ndim] += 1e-6
    assert name in engine.read_back(old, old).differing
    assert engine.read_back(["no.such.tensor"], old).count == 0


def test_minus_zero_is_not_zero_when_read_back() -> None:
    model = model_of("llama_plain")
    old = as_wire(model, torch.bfloat16)
    old["model.embed_tokens.weight"][0, 0] = 0.0
    engine = engine_of(model.config, old)
    old["model.embed_tokens.weight"][0, 0] = -0.0
    assert engine.read_back(old, old).differing == ("model.embed_tokens.weight",)


def test_a_patched_engine_goes_on_generating_with_its_cache() -> None:
    """Invariant 3: the span changes between two decode steps, and generation equals that of a full
    load.
    """
    model = model_of("qwen3")
    old = as_wire(model, torch.bfloat16)
    new = changed(old, dict.fromkeys(old, 0.05))
    found = []
    for patched in (True, False):
        engine = open_torch(model)
        engine.update(WeightUpdate(V1, old), "in_flight")
        engine.submit(ask("t", prompt(6), Sampling(temperature=0, tokens_max=40)))
        while engine.stats().tokens < 12:
            engine.poll(0.0)
        engine.update(delta(old, new) if patched else WeightUpdate(V2, new), "in_flight")
        found.append(run_all(engine)["t"])
    assert found[0] == found[1]
    assert found[0].spans[-1] == (V2, 28)
