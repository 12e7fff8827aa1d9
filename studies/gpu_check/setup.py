"""Inputs of `gpu_check`: a model of some shape, and the configuration of a run on one card.

With trained weights the task is sums, judged as GSM8K is. Random weights never answer correctly, so
their rewards are drawn (the task `numbered`) and only speed is measured.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollstream.run.sizes.shapes import SHAPES, ModelShape


def config_of(shape: ModelShape) -> dict[str, int | float | bool]:
    """The fields of `config.json` of a Qwen2.5 model with these sizes."""
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "tie_word_embeddings": shape.tied,
    }


QWEN2_5_0_5B = config_of(SHAPES["qwen2.5-0.5b"])
TINY = QWEN2_5_0_5B | {  # heads of 32, the narrowest that vLLM's CPU kernels take
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SUMS = 2000


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a check; `context` tokens hold a prompt of `prompt` and an answer of `answer`
    tokens.
    """

    shape: dict[str, int | float | bool]
    steps: int
    groups: int
    samples: int
    prompt: int
    answer: int
    slots: int
    micro_batch: int
    limit_s: float

    @property
    def context(self) -> int:
        return self.prompt + self.answer


ON_A_GPU = Size(QWEN2_5_0_5B, 16, 16, 8, 128, 512, 128, 16_384, 330.0)
DRY = Size(TINY, 4, 2, 2, 128, 24, 4, 1024, 240.0)


def make_model(shape: dict[str, int | float | bool], folder: Path) -> Path:
    """Writes a checkpoint with random weights; its tokenizer is that of the task `numbered`."""
    import torch

    from rollstream.producers.tasks.scripted import Numbered
    from rollstream.storage.starting_model.models import build_model

    model = build_model("Qwen2ForCausalLM", shape, seed=0)
    model.to(torch.bfloat16).save_pretrained(folder)  # pyright: ignore[reportArgumentType, reportUnknownMemberType]
    Numbered().tokenizer().save(folder)
    return folder


def configuration(size: Size, model: Path, folder: Path, share: float, *, is_random: bool) -> str:
    """Returns the TOML. The rollout's vLLM takes `share` of the card's memory, the trainer uses the
    rest.
    """
    return f"""run = "gpu-check"
model.path = {json.dumps(str(model))}
{_numbered(size) if is_random else _sums(folder)}
[sampling]
tokens_max = {size.answer}
[rollouts]
engine = "vllm"
count = 1
slots = {size.slots}
context_max = {size.context}
on_update = "in_flight"
vllm.memory_share = {share}
[dispatch]
max_lag = 2
[trainer]
steps = {size.steps}
groups_per_step = {size.groups}
samples_per_group = {size.samples}
micro_batch_tokens = {size.micro_batch}
workers = 1
lr = 1e-6
device = "auto"
compute = "bfloat16"
gradient_checkpointing = true
[weights]
dtype = "bfloat16"
versions_max = 4
[checkpoints]
every = {size.steps}
[evaluation]
enabled = false
[archive]
enabled = false
"""


def _numbered(size: Size) -> str:
    return f'[task]\nname = "numbered"\noptions = {{ prompt_tokens = {size.prompt} }}'


def _sums(folder: Path) -> str:
    """Sums of three numbers; a small model solves a share of them."""
    draw = np.random.default_rng(0)
    lines: list[str] = []
    for a, b, c in draw.integers(11, 990, (SUMS, 3)).tolist():
        asked = f"What is {a} + {b} - {c}? End with #### and the number."
        lines.append(json.dumps({"question": asked, "answer": f"#### {a + b - c}"}))
    path = folder / "sums.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"""[task]
name = "dataset"
[task.options]
path = {json.dumps(str(path))}
prompt = "question"
reference = "answer"
verifier = "examples.verifiers:final_number\""""
