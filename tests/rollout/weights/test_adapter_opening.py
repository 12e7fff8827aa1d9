"""A rollout of an adapter run opens its engine without a second copy of the base."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.sizes.rank_process import PeakMemory, private_bytes
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.producers.rollout.read_back import compare_all_tensors
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.run.config.config import load
from rollstream.run.metrics.endpoint import ProcessMetrics
from rollstream.run.roles.context import RoleLaunch, open_role_context
from rollstream.run.roles.rollout import open_rollout_engine
from rollstream.storage.model_folder.lora import (
    adapter_state,
    attach_adapters,
    attached_adapter,
    base_state,
)
from rollstream.storage.settings import LoraSettings, WeightsSettings
from rollstream.storage.starting_model.models import model_files
from rollstream.storage.weights.adapters import AdapterTensors
from rollstream.streams.writer import FencedWriter
from testbed.repository import ROOT
from testbed.waiting import wait_for

BEYOND_MAX = 64e6
"""Two pieces of a request, the segments of a tensor, and what opening an engine takes by itself."""
CONFIG = Qwen3Config(
    vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, head_dim=64,
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64,
    tie_word_embeddings=True,
)  # fmt: skip
SETTINGS = [
    "model.lora.rank=2",
    "rollouts.slots=2",
    "rollouts.context_max=48",
    "sampling.tokens_max=16",
]


def launch(folder: Path) -> RoleLaunch:
    (folder / "run.toml").write_text('run = "r"\n')
    return RoleLaunch(
        role="rollout",
        configuration=load(folder / "run.toml", [*SETTINGS, f"folder={folder}"], {}),
        folder=folder,
        name="rollout-0",
        stop=threading.Event(),
        nonce="",
    )


def write(folder: Path) -> None:
    """Publish version 0 of an adapter over a base of 101 MB in bf16."""
    model = Qwen3ForCausalLM(CONFIG)
    files = model_files(model, None, torch.bfloat16)
    attach_adapters(model, LoraSettings(rank=2), 0, torch.bfloat16, "base")
    state = {name: tensor.bfloat16() for name, tensor in model.named_parameters()}
    adapter = attached_adapter(model)
    assert adapter is not None
    tensors = AdapterTensors(
        adapter_state(state), adapter.config, adapter.scaling, lambda: base_state(state)
    )
    started = launch(folder)
    with open_role_context(started, ProcessMetrics(started.stop)) as place:
        writer = FencedWriter(place.bus, "weights", "trainer", 1)
        versions = VersionWriter(place.store, writer, "r", 1, WeightsSettings(), files, tuple)
        versions.open()
        versions.publish(0, tensors)


def measure(folder: Path) -> None:
    """Print the bytes beyond the engine's own while it opens."""
    started, memory = launch(folder), PeakMemory()
    with open_role_context(started, ProcessMetrics(started.stop)) as place:
        follower = WeightsFollower(place.bus, place.store)
        follower.read()
        follower.prefetch(None)
        fetched = wait_for(follower.take)
        memory.begin("open")
        engine, _ = open_rollout_engine(place, fetched)
        assert not compare_all_tensors(fetched, engine.read_back, 0.0).compared.differing
    ctypes.CDLL(None).malloc_trim(0)
    print(memory.peaks["open"] - private_bytes())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
def test_opening_an_adapter_run_takes_bounded_memory_beyond_the_engine(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "tests.rollout.weights.test_adapter_opening"]
    subprocess.run([*line, "write", str(tmp_path)], check=True, env=environment, cwd=ROOT)
    done = subprocess.run(
        [*line, "measure", str(tmp_path)], check=True, env=environment, cwd=ROOT,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert float(done.stdout.split()[-1]) < BEYOND_MAX


if __name__ == "__main__":
    {"write": write, "measure": measure}[sys.argv[1]](Path(sys.argv[2]))
