"""vLLM by itself, without this project, serves what `weights export` writes: an adapter over its
base, and the merged model.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.storage.model_folder.lora import attached_adapter, base_state
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.weights.adapters import AdapterTensors
from rollstream.storage.weights.fetch import export_version
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter
from testbed.memory import MemoryBus, MemoryStore
from testbed.waiting import WAIT_S
from tests.support.adapted_models import adapted, adapter_of
from tests.support.engine_samples import prompt
from tests.vllm.vllm_samples import vllm_model

pytestmark = pytest.mark.slow
TOKENS = 12
SERVE = """
import json, os, sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest

folder, adapter, tokens, count = json.loads(sys.argv[1])
engine = LLMEngine.from_engine_args(EngineArgs(
    model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
    max_model_len=96, max_num_seqs=2, enable_lora=bool(adapter), max_lora_rank=8,
))
params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
lora = LoRARequest("exported", 1, adapter) if adapter else None
engine.add_request("one", {"prompt_token_ids": tokens}, params, lora_request=lora)
found = []
while engine.has_unfinished_requests():
    found = engine.step() or found
print("TOKENS", json.dumps(list(found[0].outputs[0].token_ids)))
"""


def served(folder: Path, adapter: Path | None, tokens: list[int]) -> list[int]:
    """Greedy tokens of vLLM in a process of its own."""
    given = json.dumps([str(folder), "" if adapter is None else str(adapter), tokens, TOKENS])
    done = subprocess.run(
        [sys.executable, "-c", SERVE, given], cwd=folder, capture_output=True, text=True,
        timeout=WAIT_S, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("TOKENS "))


def greedy(model: torch.nn.Module, tokens: list[int]) -> list[int]:
    found = list(tokens)
    with torch.inference_mode():
        for _ in range(TOKENS):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(tokens) :]


def test_vllm_serves_an_exported_adapter_and_the_merged_model(tmp_path: Path) -> None:
    plain, bus, store = vllm_model("qwen3"), MemoryBus(), MemoryStore()
    plain.config.architectures = ["Qwen3ForCausalLM"]  # as in a saved model, which a run has
    model = adapted(plain)
    bus.create(catalogue())
    config = {"config.json": plain.config.to_json_string(use_diff=False).encode()}
    fenced = FencedWriter(bus, "weights", "trainer", 1)
    writer = VersionWriter(store, fenced, "run", 1, WeightsSettings(), config, set)
    writer.open()
    own = attached_adapter(model)
    assert own is not None
    base = base_state(model.state_dict())
    writer.publish(1, AdapterTensors(adapter_of(model), own.config, own.scaling, lambda: base))
    tokens = prompt(9).tolist()
    wanted = greedy(model.eval(), tokens)
    assert wanted != greedy(plain.eval(), tokens), "the adapter changes the tokens"

    merged = export_version(store, Version(1, 1), tmp_path / "merged", 1 << 30)
    assert served(merged.folder, None, tokens) == wanted
    adapter = export_version(store, Version(1, 1), tmp_path / "adapter", 1 << 30, merged=False)
    plain.save_pretrained(tmp_path / "base")
    assert served(tmp_path / "base", adapter.folder, tokens) == wanted
