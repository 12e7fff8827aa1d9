"""One engine over two workers, here two processes on the CPU: each takes its slice of a version
from a file, which none copies; together they give the tokens of one, and each slice is read back.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sizes.rank_memory import RankShape, write_model
from benchmarks.sizes.rollout_memory import VLLM, write
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.producers.engines.vllm.local import core
from rollstream.producers.engines.vllm.local.parameter_map import expected_tensors
from rollstream.streams.values import Sampling
from testbed.repository import ROOT
from testbed.waiting import WAIT_S
from tests.support.engine_samples import V1, V2, ask, prompt, run_all
from tests.vllm.vllm_samples import held_in_file, open_vllm, vllm_model

pytestmark = pytest.mark.slow
GREEDY = Sampling(temperature=0, tokens_max=40)
DAMAGED = [  # at one worker each
    (0, "model.embed_tokens.weight"),  # padded: all 19 rows are the first worker's
    (1, "model.layers.0.input_layernorm.weight"),  # the same at both
    (1, "model.layers.0.self_attn.k_proj.weight"),  # a head of two, beside q and v
    (0, "model.layers.1.self_attn.v_proj.bias"),
    (1, "model.layers.1.self_attn.o_proj.weight"),  # cut by columns
    (0, "model.layers.1.mlp.gate_proj.weight"),  # cut by rows, beside up_proj
    (1, "model.layers.1.mlp.down_proj.weight"),
]
SHAPE = RankShape(layers=24, hidden=768, intermediate=2048, vocabulary=4096)
SIZE = 308e6
"""Bytes of the version in bf16."""


def test_each_worker_takes_its_slice_and_the_tokens_are_those_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "WORKER_CLASS", "tests.vllm.damaged_worker.DamagedWorker")
    old, new = vllm_model("qwen2", 0), held_in_file(vllm_model("qwen2", 1).state_dict())
    settings = VllmSettings(tensor_parallel=2)
    two = VllmEngine(old.config, old.state_dict(), V1, EngineOptions(4, 96), settings=settings)
    one = open_vllm(old)
    for version in (V1, V2):
        asked = [ask(f"{version}.{i}", prompt(6, i), GREEDY) for i in range(3)]
        mine, wanted = run_all(two, asked, WAIT_S), run_all(one, asked, WAIT_S)
        assert {name: m.tokens for name, m in mine.items()} == {
            name: w.tokens for name, w in wanted.items()
        }
        assert all(m.spans == [(version, 40)] for m in mine.values())
        if version == V1:
            two.update(two.prepare(WeightUpdate(V2, new)), "in_flight")
            one.update(WeightUpdate(V2, new), "in_flight")
    names = sorted(expected_tensors(old.config).shapes)
    assert two.read_back(new, new) == WeightComparison(len(names), ())
    assert two.read_back(old.state_dict(), old.state_dict()).differing == tuple(names)
    for damaged, (worker, name) in enumerate(DAMAGED, 1):
        two._core._engine.collective_rpc(  # pyright: ignore[reportAttributeAccessIssue]
            "damage", args=(worker, name)
        )
        assert two.read_back([name], new) == WeightComparison(1, (name,))
        everything = two.read_back(new, new)
        assert everything.differing == tuple(sorted(name for _, name in DAMAGED[:damaged]))
    two.update(WeightUpdate(V2, new), "in_flight")
    assert two.read_back(new, new).differing == ()


def test_taking_a_version_needs_less_memory_than_half_of_it(tmp_path: Path) -> None:
    """In shared memory it would take all of it, and in the rollout as much again."""
    assert sum(write_model(SHAPE.config(), tmp_path / "model").values()) * 2 > SIZE
    write(tmp_path)
    line = [sys.executable, "-m", "benchmarks.sizes.rollout_memory", "apply", str(tmp_path), VLLM]
    limits = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    environment = {**os.environ, **limits, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        line, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    assert max(found["delta"], found["full"]) < SIZE / 2, found
