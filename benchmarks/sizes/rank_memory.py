"""Memory of the ranks of a sharded trainer: each holds its share and reads its share.

A model of 600 M parameters is written tensor by tensor and put into a store; no folder with its
weights is left. Four ranks (gloo) load it, each its own rows, train, publish and write a
checkpoint; a second start resumes from it and trains. Each rank samples the anonymous and shared
memory of its process; the largest peak of any rank counts.

The reference is what a rank cannot do without: its share of 16 B a parameter (master, two moments,
gradient), the parameters and gradients that a pass has gathered (the root group and one layer), and
the process as it was after it had joined.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.case import Case
from rollstream.storage.starting_model.manifest import ModelSource
from rollstream.storage.starting_model.put import put_model
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.shards import plan_shards
from testbed.repository import ROOT
from testbed.servers import free_ports

RANKS = 4
GOAL = 1.15
FILE_BYTES = 128 << 20
WAIT_S = 1800.0
JOBS = (
    ("load", "train", "publish", "train", "publish", "keep", "train"),
    ("load", "resume", "train"),
)
"""What the ranks of the first and of the second start do."""


@dataclass(frozen=True, slots=True)
class RankShape:
    """The model's sizes: 604 M parameters, or 230 M (a state above 1 GB, as in the full case)."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int = 16_000

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.hidden // 128,
            num_key_value_heads=self.hidden // 384,
            head_dim=128,
            tie_word_embeddings=True,
            max_position_embeddings=512,
        )


FULL, QUICK = RankShape(23, 1536, 4096), RankShape(15, 1152, 3072)


def cases(quick: bool) -> Iterator[Case]:
    """Yields `rank_memory`."""
    with tempfile.TemporaryDirectory() as folder:
        yield measure(Path(folder), QUICK if quick else FULL)


def measure(folder: Path, shape: RankShape) -> Case:
    """The largest peak of a rank over its reference."""
    sizes = write_model(shape.config(), folder / "model")
    put_model(open_store(f"file:{folder / 'store'}"), "run", ModelSource(folder / "model"), 0.0)
    shutil.rmtree(folder / "model")
    found = [run_ranks(folder, number, jobs) for number, jobs in enumerate(JOBS)]
    parameters = sum(sizes.values())
    group = {name: size for name, size in sizes.items() if ".layers.0." in name}
    root = sum(size for name, size in sizes.items() if ".layers." not in name)
    gathered = 8 * (root + sum(group.values()))  # fp32 parameters and gradients
    reference = parameters * 16 / RANKS + gathered
    peaks = [
        (rank["peaks"][job], rank["joined"], job)
        for start in found
        for rank in start
        for job in rank["peaks"]
    ]
    value, joined, at = max(peaks)
    base = reference + joined
    by_job = {job: max(peak for peak, _, name in peaks if name == job) for _, _, job in peaks}
    parts = ", ".join(f"{job} {peak / 1e6:.0f}" for job, peak in by_job.items())
    weights = 2 * parameters  # bf16
    read = ", ".join(f"{rank['read'] / 1e6:.1f}" for rank in found[0])
    note = (
        f"{parameters / 1e6:.0f} M parameters, {RANKS} ranks, gloo; largest while a rank does "
        f"{at!r}; peaks in MB: {parts}; a joined process {joined / 1e6:.0f}; "
        f"MB that each rank reads from the store: {read}, of {weights / 1e6:.1f}; at most the goal"
    )
    what = "16 B a parameter / ranks + gathered groups + a process that only joined"
    ratio = value / base
    return Case("rank_memory", value, "B", what, base, ratio, GOAL, ratio <= GOAL, note)


def write_model(config: Qwen3Config, folder: Path) -> dict[str, int]:
    """Write a checkpoint of random bf16 weights, one file in memory at a time; returns the number
    of elements by name.
    """
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    folder.mkdir(parents=True)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]
    draw = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    shards = plan_shards({name: 2 * prod(shape) for name, shape in shapes.items()}, FILE_BYTES)
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _drawn(shapes[name], draw) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return {name: prod(shape) for name, shape in shapes.items()}


def _drawn(shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, generator=draw).mul_(0.02).bfloat16()


def run_ranks(folder: Path, number: int, jobs: tuple[str, ...]) -> list[dict[str, Any]]:
    """Start the ranks and wait for them; returns what each measured."""
    port = str(free_ports(1)[0])
    line = [sys.executable, "-m", "benchmarks.sizes.rank_process", str(folder), str(number), *jobs]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            started.append(subprocess.Popen(line, env=_environment(rank, port), cwd=ROOT))
        for process in started:
            if process.wait(WAIT_S):
                raise RuntimeError(f"a rank of {jobs} ended with {process.returncode}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{number}-{rank}.json").read_text()) for rank in range(RANKS)]


def _environment(rank: int, port: str) -> Mapping[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
