"""Every proposed file is one that its machine's roles take: it validates, its cards exist, and the
start check accepts it.
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstream.plan.engines import PlanRequest
from rollstream.plan.planner import RunPlan
from rollstream.plan.proposed_files import MachineFile, machine_files, toml_files
from rollstream.run.config.config import fingerprint, validate_layers
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import SettingLayers
from rollstream.run.sizes.check import check_memory, lone_use
from rollstream.run.sizes.devices import CARDS_PER_MACHINE
from rollstream.run.sizes.shapes import ModelShape
from rollstream.run.supervisor.cards import GpuCard, assign_cards
from tests.sizes.test_planner import PLANS, plan

SEVERAL_MACHINES = [
    ("qwen2.5-7b", "12xH100", 0), ("qwen2.5-7b", "16xH100", 0), ("qwen2.5-7b", "20xH100", 0),
    ("qwen2.5-7b", "12xH100", 16), ("qwen2.5-32b", "16xH200", 16), ("llama-3.1-70b", "64xH100", 0),
    ("llama-3.1-70b", "16xB200", 16), ("llama-3.1-405b", "1024xH200", 0),
    ("mixtral-8x7b", "64xH200", 0),
]  # fmt: skip
CASES = [*((model, gpus, lora) for model, gpus in PLANS for lora in (0, 16)), *SEVERAL_MACHINES]


def proposed_plan(model: str, gpus: str, lora: int) -> RunPlan | None:
    return plan(model, gpus, lora=lora).proposed


def write_model(shape: ModelShape, folder: Path) -> None:
    """Write the `config.json` of this shape."""
    fields: dict[str, Any] = {
        "model_type": shape.family, "vocab_size": shape.vocabulary, "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.width, "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    if shape.experts is not None:
        e = shape.experts
        fields |= {
            "num_local_experts": e.count, "num_experts": e.count, "num_experts_per_tok": e.used,
            "moe_intermediate_size": e.intermediate,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))


def configuration_of(text: str, model: Path) -> Configuration:
    settings = tomllib.loads(text)
    settings["model"]["path"] = str(model)
    return validate_layers(SettingLayers(settings))


def cards_of(file: MachineFile, request: PlanRequest) -> Sequence[GpuCard]:
    """The cards of a machine of this kind: the last one may have fewer."""
    count = min(request.cards, CARDS_PER_MACHINE)
    return [GpuCard(str(number), request.card.name, request.card.memory) for number in range(count)]


@pytest.mark.parametrize(("model", "gpus", "lora"), CASES)
def test_the_start_check_accepts_every_proposed_file(
    model: str, gpus: str, lora: int, tmp_path: Path
) -> None:
    proposed = proposed_plan(model, gpus, lora)
    if proposed is None:
        assert (lora, model) in {(16, "llama-3.1-70b"), (16, "llama-3.1-405b")}, "one card holds it"
        return
    assert proposed.layout is not None
    request = proposed.request
    write_model(request.shape, tmp_path)
    files, texts = machine_files(proposed), toml_files(proposed, "plan.toml")
    assert [*texts] == [one.name("plan.toml") for one in files]
    roles: list[str] = []
    for file, text in zip(files, texts.values(), strict=True):
        c = configuration_of(text, tmp_path)
        cards = cards_of(file, request)
        assigned = assign_cards(c, cards)
        roles += assigned
        check_memory(c, tmp_path, assigned, file.ranks)
        if file.kind == "rollouts":
            check_memory(c, tmp_path, lone_use(c, "rollout", cards))
        if file.kind == "trainer" and not file.generates:
            check_memory(c, tmp_path, lone_use(c, "train", cards), file.ranks)
    assert "trainer" in roles
    assert "rollout-0" in roles
    engines = sum(
        one.machines * one.settings["rollouts"]["count"]
        for one in files
        if "rollouts" in one.settings["devices"]
    )
    assert engines >= proposed.layout.engines
    assert sum(one.machines for one in files) == request.machines


def test_several_machines_are_told_what_to_start() -> None:
    """16 H100 for all parameters of 7B, 12 for an adapter: `run` starts one machine's roles."""
    full, adapter = (
        machine_files(proposed)
        for one in (("qwen2.5-7b", "16xH100", 0), ("qwen2.5-7b", "12xH100", 16))
        if (proposed := proposed_plan(*one))
    )
    assert [one.kind for one in (*full, *adapter)] == ["trainer", "rollouts"] * 2
    trains, generates = (one.commands("f.toml") for one in full)
    assert trains[0] == "rollstream train f.toml --run RUN"
    assert "for role in prompts dispatch archive" in trains[1]
    assert generates[0].startswith("rollstream relay f.toml --run RUN")
    assert "seq 0 7" in generates[1]
    assert "CUDA_VISIBLE_DEVICES=$n rollstream rollout f.toml" in generates[1]
    assert adapter[0].commands("f.toml") == ["rollstream run f.toml --run RUN"]
    assert adapter[0].settings["devices"] == {"trainer": 1, "rollouts": 7}
    assert adapter[1].settings["rollouts"]["count"] == 4


def test_ranks_on_several_machines_are_started_by_torchrun() -> None:
    proposed = proposed_plan("llama-3.1-405b", "1024xH200", 0)
    assert proposed is not None
    trainer, rollouts = machine_files(proposed)
    command = trainer.commands("f.toml")[0]
    assert command.startswith(f"torchrun --nnodes {trainer.machines} --nproc-per-node 8 ")
    assert trainer.ranks == 8 * trainer.machines
    assert "CUDA_VISIBLE_DEVICES=$(seq -s, $((n * 8)) $((n * 8 + 7)))" in rollouts.commands("f")[1]


def test_all_machines_agree_on_the_runs_configuration(tmp_path: Path) -> None:
    proposed = proposed_plan("llama-3.1-70b", "64xH100", 0)
    assert proposed is not None
    write_model(proposed.request.shape, tmp_path)
    texts = toml_files(proposed, "here/plan.toml")
    assert [*texts] == ["here/plan-trainer.toml", "here/plan-rollouts.toml"]
    one, other = (configuration_of(text, tmp_path) for text in texts.values())
    assert one != other
    assert fingerprint(one) == fingerprint(other)
    assert one.relay.bytes_max > 2 * 2 * proposed.request.shape.parameters


def test_a_model_of_the_table_is_named_as_the_hub_does_with_how_to_download_it() -> None:
    proposed = proposed_plan("qwen3-30b-a3b", "8xH200", 0)
    assert proposed is not None
    (text,) = toml_files(proposed, "plan.toml").values()
    assert 'path = "Qwen/Qwen3-30B-A3B"' in text
    assert "first `hf download Qwen/Qwen3-30B-A3B`" in text


def test_the_embedded_engine_is_planned_where_vllm_caches_too_little_with_the_reason() -> None:
    proposed = proposed_plan("qwen2.5-0.5b", "1x8GB", 16)
    assert proposed is not None
    (text,) = toml_files(proposed, "plan.toml").values()
    assert 'engine = "torch"' in text
    assert "# engine torch: vLLM would cache 7 longest sequences here and needs 8" in text
    larger = proposed_plan("qwen2.5-0.5b", "1x24GB", 16)
    assert larger is not None
    assert 'engine = "vllm"' in "".join(toml_files(larger, "plan.toml").values())
