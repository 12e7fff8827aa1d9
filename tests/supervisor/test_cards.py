"""Each process sees the GPUs that `[devices]` gives its role, and no other; a wrong assignment is
refused before anything starts. No GPU is needed: the cards are passed in.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollstream.consumers.trainer.rank_plan import is_launched
from rollstream.errors import ConfigurationError
from rollstream.run.config.config import validate_layers
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import SettingLayers
from rollstream.run.supervisor.cards import (
    GpuCard,
    assign_cards,
    first_host,
    ranks_of_slurm,
    read_cards,
    visible_cards,
)
from rollstream.run.supervisor.plan import process_specs
from rollstream.run.supervisor.process import ChildProcess, ProcessSpec
from testbed.run_process import random_model
from testbed.waiting import WAIT_S, wait_for

LISTING = "\n".join(f"{n}, GPU-{n}aaa-bbb, NVIDIA H100 80GB HBM3, 81559" for n in range(8))
EIGHT = visible_cards(LISTING, None)
VLLM = {"engine": "vllm", "count": 4}


def configuration(**tables: dict[str, Any]) -> Configuration:
    return validate_layers(SettingLayers(dict(tables)))


def assigned(cards: Sequence[GpuCard] = EIGHT, **tables: dict[str, Any]) -> Mapping[str, str]:
    tables = {"evaluation": {"enabled": False}, **tables}
    found = assign_cards(configuration(**tables), cards)
    return {name: ",".join(card.index for card in own) for name, own in found.items()}


def test_a_card_whose_memory_is_not_stated_is_one():
    lines = "a warning of the driver\n0, GPU-0aaa, NVIDIA GB10, [N/A]\n"
    assert visible_cards(lines, None) == (GpuCard("0", "NVIDIA GB10", inf),)


def test_slices_of_a_card_are_cards():
    cards = visible_cards(LISTING, "MIG-1234-5678,MIG-GPU-0aaa-bbb/1/0")
    assert [card.index for card in cards] == ["MIG-1234-5678", "MIG-GPU-0aaa-bbb/1/0"]
    assert {card.memory for card in cards} == {inf}


def test_cards_are_those_that_the_environment_leaves_in_its_order() -> None:
    assert [card.index for card in EIGHT] == list("01234567")
    assert EIGHT[0].memory == 81_559 * 2**20
    assert [card.index for card in visible_cards(LISTING, "5,GPU-2aaa")] == ["5", "2"]
    assert visible_cards(LISTING, "") == ()
    assert [card.index for card in visible_cards(LISTING, "1,99,2")] == ["1"]  # as CUDA does


def test_without_a_driver_there_are_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert read_cards({}) == ()


def test_counts_take_cards_in_turn_and_nothing_is_assigned_without_devices() -> None:
    trainer = {"device": "cuda", "processes": 4}
    found = assigned(trainer=trainer, rollouts=VLLM, devices={"trainer": 4, "rollouts": 4})
    assert found == {
        "trainer": "0,1,2,3", "rollout-0": "4", "rollout-1": "5", "rollout-2": "6", "rollout-3": "7"
    }  # fmt: skip
    assert assigned(trainer=trainer, rollouts=VLLM) == {}


def test_lists_name_positions_and_engines_take_groups() -> None:
    rollouts = {"engine": "vllm", "count": 2, "vllm": {"tensor_parallel": 2}}
    found = assigned(
        visible_cards(LISTING, "7,6,5,4,3,2"),
        trainer={"device": "cuda"},
        rollouts=rollouts,
        devices={"trainer": [5], "rollouts": [0, 1, 2, 3]},
    )
    assert found == {"trainer": "2", "rollout-0": "7,6", "rollout-1": "5,4"}


def test_an_engine_of_several_stages_takes_as_many_cards() -> None:
    vllm = {"tensor_parallel": 2, "args": {"pipeline_parallel_size": 2}}
    found = assigned(rollouts={"engine": "vllm", "count": 2, "vllm": vllm}, devices={"rollouts": 8})
    assert found == {"rollout-0": "0,1,2,3", "rollout-1": "4,5,6,7"}


def test_scorers_with_the_reference_share_the_trainers_first_card() -> None:
    trainer = {"device": "cuda", "processes": 2, "reference_kl": 0.1, "reference_by": "score"}
    scoring = {"count": 2, "function": "reference"}
    tables: dict[str, Any] = {"trainer": trainer, "rollouts": VLLM, "devices": {"trainer": 2}}
    assert assigned(**tables, scoring=scoring) == {
        "trainer": "0,1", "scorer-0": "0", "scorer-1": "0"
    }  # fmt: skip
    assert assigned(**tables, scoring={"count": 2}) == {"trainer": "0,1"}


def test_the_evaluation_shares_the_first_cards_of_its_role() -> None:
    vllm = {"memory_share": 0.45}
    tables: dict[str, Any] = {
        "trainer": {"device": "cuda"},
        "rollouts": {"engine": "vllm", "count": 2, "vllm": vllm},
        "evaluation": {"enabled": True},
    }
    found = assigned(**tables, devices={"trainer": 1, "rollouts": 2})
    assert found["eval"] == found["rollout-0"] == "1"
    found = assigned(**tables, devices={"trainer": 1, "rollouts": 2, "evaluation": "trainer"})
    assert found["eval"] == found["trainer"] == "0"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"devices": {"trainer": 9}}, "needs GPU 8, and 8 are visible"),
        ({"devices": {"trainer": [1, 1]}}, "names a GPU twice"),
        ({"devices": {"trainer": 2}}, "has 2 GPUs, and trainer.processes is 1"),
        ({"devices": {"trainer": 1}, "trainer": {"device": "cpu"}}, "must be 'cuda'"),
        ({"devices": {"rollouts": 1}, "rollouts": {"engine": "torch"}}, "rollouts.device"),
        (
            {"devices": {"rollouts": 3}, "rollouts": {**VLLM, "vllm": {"tensor_parallel": 2}}},
            "has 3 GPUs, and one engine takes 2",
        ),
        ({"devices": {"rollouts": 1}, "rollouts": {**VLLM, "count": 2}}, r"take 1.8 of it"),
        (
            {"devices": {"trainer": [0], "rollouts": [0]}, "rollouts": {**VLLM, "count": 1}},
            r"GPU 0 is given to trainer, rollout-0, .* at most 0.85",
        ),
    ],
)
def test_a_wrong_assignment_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        assigned(**{"trainer": {"device": "cuda"}, **tables})


def test_shares_that_leave_room_admit_an_overlap() -> None:
    found = assigned(
        trainer={"device": "cuda"},
        rollouts={"engine": "vllm", "count": 1, "vllm": {"memory_share": 0.4}},
        evaluation={"enabled": True},
        devices={"trainer": [0], "rollouts": [0]},
    )
    assert found == {"trainer": "0", "rollout-0": "0", "eval": "0"}


def test_every_process_of_a_run_really_sees_its_own_cards(tmp_path: Path) -> None:
    """The environment that the planned processes receive, read back from real processes."""
    c = configuration(
        trainer={"device": "cuda", "processes": 2},
        rollouts={"engine": "vllm", "count": 2},
        evaluation={"enabled": False},
        devices={"trainer": 2, "rollouts": 2},
    )
    specs = process_specs(c, RunFolder(tmp_path), cards=assign_cards(c, EIGHT))
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    seen: dict[str, str] = {}
    for spec in specs:
        own = ProcessSpec(spec.name, [sys.executable, "-c", code], environment=spec.environment)
        log = tmp_path / f"{spec.name}.log"
        child = ChildProcess(own, log, {}, None)
        wait_for(lambda child=child: child.reap() is not None)
        environment = json.loads(log.read_text())
        seen[spec.name] = environment["CUDA_VISIBLE_DEVICES"]
        assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert seen.pop("trainer") == "0,1"
    assert (seen.pop("rollout-0"), seen.pop("rollout-1")) == ("2", "3")
    assert set(seen.values()) == {""}


def test_without_devices_processes_inherit_their_visibility(tmp_path: Path) -> None:
    specs = process_specs(configuration(), RunFolder(tmp_path))
    assert all("CUDA_VISIBLE_DEVICES" not in spec.environment for spec in specs)


SLURM = {
    "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "70012", "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}  # fmt: skip


def test_a_task_of_srun_is_a_rank() -> None:
    found = ranks_of_slurm(SLURM)
    assert found == {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "29512",
    }  # fmt: skip
    assert is_launched(SLURM | found)


def test_a_task_that_sees_one_card_uses_it() -> None:
    assert ranks_of_slurm(SLURM | {"CUDA_VISIBLE_DEVICES": "3"})["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script, not a step
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
        SLURM | {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun inside of a step
    ],
)
def test_other_environments_are_left_alone(environment: dict[str, str]) -> None:
    assert ranks_of_slurm(environment) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu[03-05,9],login1", "gpu03"), ("a1,b2", "a1"), ("n[7,9]", "n7"), ("", "127.0.0.1")],
)
def test_the_first_host_of_a_compact_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def command(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "rollstream", *words]
    return subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.mark.slow
def test_rollstream_train_under_srun_joins_the_ranks_of_its_step(tmp_path: Path) -> None:
    """A rank whose peers are missing ends; it is not started as the only trainer."""
    run = ["examples/quickstart.toml", "--run", str(tmp_path / "run")]
    model = str(random_model(tmp_path / "model"))
    assert command("put-model", model, *run, environment=dict(os.environ)).returncode == 0
    environment = os.environ | SLURM | {"SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": "1"}
    settings = ["--set", "trainer.ranks_timeout_s=3"]
    done = command("train", *run, *settings, environment=environment)
    assert done.returncode not in (0, 2)
    assert "ranks did not all join" in done.stderr


def write_hollow_weights(folder: Path) -> None:
    """Writes the weights that config.json states as a file of holes, which takes no room."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in model.named_parameters():
        begin, end = end, end + 4 * tensor.numel()
        offsets = [begin, end]
        header[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": offsets}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.slow
def test_a_run_that_cannot_fit_the_listed_card_ends_at_its_start(tmp_path: Path) -> None:
    """`rollstream run` on a machine whose driver lists one small card."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aaa, NVIDIA T400, 2048'\n")
    tool.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    fields = {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(fields))
    write_hollow_weights(model)
    toml = tmp_path / "run.toml"
    toml.write_text(f'[model]\npath = "{model}"\n[trainer]\ndevice = "cuda"\n')
    words = ["run", str(toml), "--run", str(tmp_path / "run")]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = command(*words, environment=environment)
    assert done.returncode == 2, done.stderr
    assert "the run does not fit: GPU 0 (NVIDIA T400) has 2.1 GB" in done.stderr
    assert not list((tmp_path / "run" / "logs").glob("*"))
