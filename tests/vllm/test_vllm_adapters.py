"""LoRA on vLLM: versions side by side as LoRA requests, or one version in flight, compared with the
same adapters merged into plain models.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import GenerationRequest, WeightComparison
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.adapters import adapter_name
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.producers.engines.vllm.local import core
from rollstream.storage.settings import LoraSettings
from rollstream.streams.values import Sampling, Version
from testbed.update_reference import over_old_cache
from testbed.waiting import WAIT_S
from tests.support.adapted_models import LORA, adapted, adapter_update, merged, with_fault
from tests.support.engine_samples import (
    Gained,
    ask,
    chosen_logprobs,
    gather,
    half_way,
    prompt,
    run_all,
    to_the_end,
)
from tests.vllm.vllm_samples import vllm_model

pytestmark = pytest.mark.slow
BASE = Version(0, 0)
VERSIONS = [Version(number, 1 + number // 3) for number in range(1, 6)]
GREEDY = Sampling(temperature=0, tokens_max=24)


class Adapted:
    """An engine over the base, and by version the adapted models and the same ones merged."""

    def __init__(
        self, family: str = "qwen3", process: bool = False, tensor_parallel: int = 1
    ) -> None:
        self.plain = vllm_model(family)
        self.models = {v: adapted(self.plain, seed=v.number) for v in VERSIONS}
        self.whole = {v: merged(model, self.plain) for v, model in self.models.items()}
        self.engine = VllmEngine(
            self.plain.config,
            self.plain.state_dict(),
            BASE,
            EngineOptions(4, 160, adapter_rank=LORA.rank),
            settings=VllmSettings(process=process, tensor_parallel=tensor_parallel),
        )

    def update(self, version: Version, mode: Any = "keep_version") -> None:
        prepared = self.engine.prepare(adapter_update(version, self.models[version]))
        self.engine.update(prepared, mode)

    def held(self) -> set[int]:
        """The ids of the adapters that vLLM holds."""
        return set(self.engine._core._engine.list_loras())  # pyright: ignore[reportAttributeAccessIssue]


def named(name: str, version: Version, length: int = 6, sampling: Sampling = GREEDY):
    return replace(ask(name, prompt(length), sampling), version=version)


def check(gained: Gained, request: GenerationRequest, model: PreTrainedModel) -> None:
    wanted = chosen_logprobs(model, request.tokens, gained.tokens)
    torch.testing.assert_close(torch.tensor(gained.logprobs), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_versions_side_by_side_are_those_of_their_merged_models(family: str) -> None:
    """Also from equal prompts of several blocks, which a sibling of the same version finds in the
    prefix cache.
    """
    opened = Adapted(family)
    base = opened.plain.state_dict()
    assert opened.engine.read_back(base, base).differing == ()
    requests: list[GenerationRequest] = []
    for version in VERSIONS:
        opened.update(version)
        for i in range(2):
            requests.append(named(f"{version}-{i}", version, length=100))
            opened.engine.submit(requests[-1])
    assert opened.engine.versions == VERSIONS
    gained = run_all(opened.engine)
    for request in requests:
        assert request.version is not None
        mine = gained[request.trajectory]
        assert mine.spans == [(request.version, 24)]
        check(mine, request, opened.whole[request.version])


def test_an_adapter_leaves_with_the_last_sequence_that_names_it() -> None:
    opened, (first, second, third) = Adapted(), VERSIONS[:3]
    engine = opened.engine
    opened.update(first)
    for name, tokens in (("a", 8), ("b", 30)):
        engine.submit(named(name, first, sampling=Sampling(temperature=0, tokens_max=tokens)))
    for version in (second, third):
        opened.update(version)
    assert engine.versions == [first, third], "no sequence names the second"
    assert opened.held() == {adapter_name(first)[1], adapter_name(third)[1]}
    gained: dict[str, Gained] = {}
    while "a" not in gained or gained["a"].finish is None:
        gather(gained, engine.poll(0.0))
    assert engine.versions == [first, third]
    run_all(engine)
    assert engine.versions == [third]
    assert opened.held() == {adapter_name(third)[1]} == {(2 << 32) + 3}
    for version in (first, None):
        with pytest.raises(EngineRefused, match="is not here"):
            engine.submit(replace(named("c", third), version=version))


def test_an_older_version_is_served_beside_the_newest_and_leaves_after_an_abort() -> None:
    opened, (first, second) = Adapted(), VERSIONS[:2]
    opened.update(second)
    new, old = named("new", second), named("old", first)
    opened.engine.submit(new)
    opened.update(first)
    assert opened.engine.version == second
    opened.engine.submit(old)
    opened.update(VERSIONS[2])
    gained: dict[str, Gained] = {}
    while opened.engine.stats().tokens < 10:
        gather(gained, opened.engine.poll(0.0))
    opened.engine.abort("old")
    assert opened.engine.versions == VERSIONS[1:3]
    gained |= run_all(opened.engine)
    check(gained["new"], new, opened.whole[second])


def test_a_version_that_is_loaded_again_finds_no_prefix_of_its_first_load() -> None:
    opened, (first, second) = Adapted(), VERSIONS[:2]
    opened.update(first)
    run_all(opened.engine, [named("t", first, length=100)])
    opened.models[first] = opened.models[second]
    opened.update(first)
    again = named("u", first, length=100)
    check(run_all(opened.engine, [again])["u"], again, opened.whole[second])


@pytest.mark.parametrize("process", [False, True])
def test_served_factors_are_compared_bit_for_bit(process: bool) -> None:
    opened, first = Adapted(process=process), VERSIONS[0]
    opened.update(first)
    tensors = dict(adapter_update(first, opened.models[first]).tensors)
    compared = opened.engine.read_back(tensors, tensors)
    assert (compared.count, compared.differing) == (len(tensors), ())
    other = dict(tensors)
    wrong = [name for name in tensors if "layers.1" in name and ("k_proj" in name or "up" in name)]
    for name in wrong:
        bits = other[name] = tensors[name].clone()
        bits.view(torch.int32)[0, 0] ^= 1 << 22
    assert opened.engine.read_back(other, other).differing == tuple(sorted(wrong))
    request = named("t", first)
    check(run_all(opened.engine, [request])["t"], request, opened.whole[first])


def test_a_stacked_factor_that_changed_is_found() -> None:
    """Also where only the zeros of a padded rank did."""
    opened, first = Adapted(), VERSIONS[0]
    opened.update(first)
    tensors = adapter_update(first, opened.models[first]).tensors
    engine_core: Any = opened.engine._core
    (worker,) = [engine_core._engine.engine_core.engine_core.model_executor.driver_worker.worker]
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(adapter_name(first)[1])
    manager.modules["model.layers.0.self_attn.qkv_proj"].lora_a_stacked[2][slot, 0, -1, 0] = 1.0
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
    assert opened.engine.read_back(tensors, tensors).differing == (name,)


def test_two_workers_serve_their_parts_of_each_adapter_and_each_part_is_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Factors of layers that are cut by rows, by columns, and packed beside others."""
    monkeypatch.setattr(core, "WORKER_CLASS", "tests.vllm.damaged_worker.DamagedWorker")
    opened, (first, second) = Adapted(process=True, tensor_parallel=2), VERSIONS[:2]
    for version in (first, second):
        opened.update(version)
        opened.engine.submit(named(str(version), version))
        tensors = adapter_update(version, opened.models[version]).tensors
        assert opened.engine.read_back(tensors, tensors) == WeightComparison(len(tensors), ())
    gained = run_all(opened.engine, wait_s=WAIT_S)
    for version in (first, second):
        request = named(str(version), version)
        check(gained[str(version)], request, opened.whole[version])
    tensors = adapter_update(second, opened.models[second]).tensors
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    assert opened.engine.read_back(other, other).differing == tuple(sorted(tensors))
    for worker, layer, part, name in (
        (0, "self_attn.qkv_proj", 1, "self_attn.k_proj"),
        (1, "mlp.gate_up_proj", 0, "mlp.gate_proj"),
        (1, "mlp.down_proj", 0, "mlp.down_proj"),
    ):
        opened.update(second)
        damaged = adapter_name(second)[1], f"model.layers.1.{layer}", part
        opened.engine._core.call_all("damage_factor", worker, *damaged)  # pyright: ignore[reportAttributeAccessIssue]
        (wrong,) = opened.engine.read_back(tensors, tensors).differing
        assert wrong.endswith(f"layers.1.{name}.lora_B.weight")


@pytest.mark.parametrize("process", [False, True])
def test_in_flight_changes_the_adapter_under_the_old_cache_and_stamps_spans(process: bool) -> None:
    opened, (first, second) = Adapted(process=process), VERSIONS[:2]
    opened.update(first, "in_flight")
    gained = half_way(opened.engine)
    opened.update(second, "in_flight")
    mine = to_the_end(opened.engine, gained)
    (_, before), (_, after) = mine.spans
    assert (mine.spans[0][0], mine.spans[1][0], before + after) == (first, second, 40)
    old, new = opened.whole[first], opened.whole[second]
    greedy, logprobs = over_old_cache(old, new, prompt(6), mine.tokens, before)
    assert mine.tokens == greedy
    torch.testing.assert_close(torch.tensor(mine.logprobs), logprobs, atol=1e-4, rtol=0)
    assert opened.engine.versions == [second]
    assert opened.held() == {1}


def test_recompute_equals_a_prefill_under_the_new_adapter() -> None:
    opened, (first, second) = Adapted(), VERSIONS[:2]
    opened.update(first, "in_flight")
    gained = half_way(opened.engine)
    opened.update(second, "in_flight_recompute")
    mine = to_the_end(opened.engine, gained)
    wanted = chosen_logprobs(opened.whole[second], prompt(6), mine.tokens)
    torch.testing.assert_close(torch.tensor(mine.logprobs[12:]), wanted[12:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("fault", ["missing", "shape", "unknown", "nan", "rank"])
def test_a_wrong_adapter_is_refused_and_the_others_are_served_on(fault: str) -> None:
    opened, (first, second) = Adapted(), VERSIONS[:2]
    opened.update(first)
    opened.engine.submit(named("t", first))
    model = opened.models[second]
    if fault == "rank":
        model = adapted(opened.plain, LoraSettings(rank=9, alpha=9.0))
    unknown = "base_model.model.model.norm.lora_A.weight"
    bad = with_fault(adapter_update(second, model), fault, unknown)
    with pytest.raises(EngineRefused, match=r"up_proj|norm|rank 9"):
        opened.engine.update(bad, "keep_version")
    assert run_all(opened.engine)["t"].spans == [(first, 24)]
