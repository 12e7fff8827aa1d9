"""A run that cannot fit its GPUs is refused at its start by one sentence, and a run without known
GPUs never is.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.vllm.adapters import TOGETHER
from rollstream.producers.engines.vllm.local.core import LORA_RANKS
from rollstream.run.cli.role import check_own_cards
from rollstream.run.config.config import validate_layers
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import SettingLayers
from rollstream.run.sizes.arithmetic import CONTEXT_BYTES
from rollstream.run.sizes.check import check_memory, needed_bytes, unassigned_use, uses_gpus
from rollstream.run.sizes.shapes import SHAPES
from rollstream.run.sizes.vllm_memory import ADAPTER_RANKS, ADAPTERS_TOGETHER, vllm_lines
from rollstream.run.supervisor.cards import GpuCard

FIELDS = {  # of Qwen2.5-1.5B
    "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
CARD = GpuCard("0", "NVIDIA RTX 4090", 24e9)


def configuration(**tables: dict[str, Any]) -> Configuration:
    return validate_layers(SettingLayers(dict(tables)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    return tmp_path


def test_a_trainer_that_cannot_fit_is_refused_with_what_to_change(model: Path) -> None:
    c = configuration(trainer={"device": "cuda"})
    with pytest.raises(ConfigurationError) as refused:
        check_memory(c, model, {"trainer": [CARD]})
    text = str(refused.value)
    assert "GPU 0 (NVIDIA RTX 4090) has 24.0 GB" in text
    assert "trainer" in text
    assert "gradient_checkpointing" in text
    assert "trainer.cpu_offload = true" in text
    assert len(text.splitlines()) == 1


def test_the_same_trainer_fits_with_its_state_in_host_memory(model: Path) -> None:
    trainer = {"device": "cuda", "compute": "bfloat16", "gradient_checkpointing": True}
    with pytest.raises(ConfigurationError, match=r"set trainer\.cpu_offload = true"):
        check_memory(configuration(trainer=trainer), model, {"trainer": [CARD]})
    offloaded = configuration(trainer={**trainer, "cpu_offload": True})
    check_memory(offloaded, model, {"trainer": [CARD]})


def test_the_same_trainer_fits_a_larger_card(model: Path) -> None:
    c = configuration(trainer={"device": "cuda", "compute": "bfloat16"})
    check_memory(c, model, {"trainer": [GpuCard("0", "H100", 80e9)]})


def test_roles_that_share_a_card_must_fit_together(model: Path) -> None:
    c = configuration(
        trainer={"device": "cuda", "compute": "bfloat16", "gradient_checkpointing": True},
        rollouts={"engine": "vllm", "count": 1},
        evaluation={"enabled": False},
    )
    used = unassigned_use(c, [GpuCard("0", "H100", 80e9)])
    assert set(used) == {"trainer", "rollout-0"}
    with pytest.raises(ConfigurationError, match=r"rollout-0 72.0 GB.*memory_share"):
        check_memory(c, model, used)


def test_the_reference_is_counted_where_it_is_held() -> None:
    """In the trainer, or in a scorer on its first card; a teacher by its own size."""
    shape, card = SHAPES["qwen2.5-1.5b"], GpuCard("0", "H100", 80e9)
    kl = {"device": "cuda", "compute": "bfloat16", "reference_kl": 0.1}
    own = configuration(trainer=kl)
    scoring = {"count": 1, "function": "reference"}
    scored = configuration(trainer={**kl, "reference_by": "score"}, scoring=scoring)
    before, after = (needed_bytes(c, shape, "trainer", card) for c in (own, scored))
    assert before - after == 2 * shape.parameters
    assert set(unassigned_use(scored, [card])) >= {"trainer", "scorer-0"}
    scorer = needed_bytes(scored, shape, "scorer-0", card)
    assert scorer - CONTEXT_BYTES == before - after


def test_an_engine_for_adapters_needs_the_factors_of_a_step_and_an_evaluation_does_not() -> None:
    """Rank 20 is padded to 32; eight versions of bfloat16."""
    shape, card = SHAPES["qwen2.5-1.5b"], GpuCard("0", "H100", 80e9)
    vllm = {"memory_share": 0.01}
    asked = {"engine": "vllm", "vllm": vllm}
    needed = [
        needed_bytes(configuration(rollouts=asked, model=model), shape, process, card)
        for model in ({}, {"lora": {"rank": 20}})
        for process in ("rollout-0", "eval")
    ]
    assert needed[0] == needed[1] == needed[3]
    assert needed[2] == needed[0] + 8 * 2 * shape.adapter_parameters(32)
    one, two = (
        {line.what: line.bytes for line in vllm_lines(shape, cards, 1, 2, 32)} for cards in (1, 2)
    )
    whole = 28 * 32 * 7 * 1536  # each matrix has the hidden size on one side
    assert one["adapters in one step"] == 8 * 2 * shape.adapter_parameters(32)
    assert two["adapters in one step"] == 8 * 2 * (shape.adapter_parameters(32) + whole) / 2
    assert (ADAPTERS_TOGETHER, ADAPTER_RANKS) == (TOGETHER, LORA_RANKS)


@pytest.fixture
def listed_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of one card of 24 GB, as its driver lists it."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA RTX 4090, 22888'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("CUDA_VISIBLE_DEVICES", "ROLLSTREAM_NONCE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "0")


@pytest.mark.usefixtures("listed_card")
def test_a_trainer_of_several_machines_is_checked_with_all_its_ranks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.5B: 24.7 GB of state for one rank, 1.5 for each of 16, on whatever machines they are."""
    trainer = {"device": "cuda", "compute": "bfloat16", "gradient_checkpointing": True}
    c = configuration(trainer=trainer, model={"path": str(model)})
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigurationError, match="or more machines"):
        check_own_cards("train", c, RunFolder(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "16")
    check_own_cards("train", c, RunFolder(tmp_path))
    check_own_cards("rollout", c, RunFolder(tmp_path))


@pytest.mark.usefixtures("listed_card")
def test_a_rollout_that_is_started_alone_is_checked_and_one_of_a_launcher_is_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = {"engine": "vllm", "context_max": 4096, "vllm": {"memory_share": 1.0}}
    fields = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 400}
    (model / "config.json").write_text(json.dumps(fields))
    c = configuration(rollouts=rollouts, model={"path": str(model)})
    with pytest.raises(ConfigurationError, match="rollout 4"):
        check_own_cards("rollout", c, RunFolder(tmp_path))
    check_own_cards("dispatch", c, RunFolder(tmp_path))
    monkeypatch.setenv("ROLLSTREAM_NONCE", "1")
    check_own_cards("rollout", c, RunFolder(tmp_path))


def test_an_engine_that_is_too_large_for_its_share_is_refused(model: Path) -> None:
    c = configuration(rollouts={"engine": "vllm"}, evaluation={"enabled": False})
    small = GpuCard("0", "small", 4e9)
    with pytest.raises(ConfigurationError, match="tensor_parallel"):
        check_memory(c, model, {"rollout-0": [small]})


def test_runs_on_the_cpu_and_unknown_models_are_never_refused(tmp_path: Path, model: Path) -> None:
    assert not uses_gpus(configuration())
    assert uses_gpus(configuration(trainer={"device": "cuda"}))
    check_memory(configuration(trainer={"device": "cuda"}), model, {})
    check_memory(configuration(), tmp_path / "none", {"trainer": [CARD]})
