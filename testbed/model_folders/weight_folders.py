"""Folders with weights of small models (`WEIGHT_FOLDERS`): tied and untied, in one file and behind
an index, with tensors too many, too few, twice, or of other values than the configuration states.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

Tensors = dict[str, torch.Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """One folder: `write` makes it. A folder that contradicts itself is `refused` by every reader,
    with these words; any other is read as transformers reads it.
    """

    name: str
    write: Callable[[Path], None]
    refused: str = ""


def llama(is_tied: bool) -> PreTrainedModel:
    """Returns a new model with equal weights at each call."""
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=is_tied))


def qwen(is_tied: bool) -> PreTrainedModel:
    torch.manual_seed(8)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=is_tied))


def gpt2(is_tied: bool) -> PreTrainedModel:
    torch.manual_seed(9)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 32,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=is_tied))


def write_weights(
    folder: Path,
    model: PreTrainedModel,
    change: Callable[[Tensors], object] = lambda tensors: None,
    shards: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the configuration and the weights, tied ones once, after `change`; with `shards` into
    so many files behind an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    owners: dict[int, str] = {}
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        if owners.setdefault(tensor.data_ptr(), name) == name:
            tensors[name] = tensor.detach().to(dtype).clone()
    change(tensors)
    if not shards:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    placed = {name: files[place % shards] for place, name in enumerate(sorted(tensors))}
    for file in files:
        own = {name: tensor for name, tensor in tensors.items() if placed[name] == file}
        save_file(own, folder / file, {"format": "pt"})
    _write_index(folder, placed)


def _write_index(folder: Path, placed: Mapping[str, str]) -> None:
    index: dict[str, Any] = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def _set(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _with_head(scale: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone() * scale})


def _swapped(tensors: Tensors) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def _more(tensors: Tensors) -> None:
    tensors["model.layers.2.input_layernorm.weight"] = torch.ones(16)
    tensors["mtp.head.weight"] = torch.ones(4, 4)


def _without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _bare(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def _lost(folder: Path) -> None:
    write_weights(folder, llama(False), shards=2)
    _write_index(folder, _index(folder) | {"model.layers.9.w": "model-00001-of-00002.safetensors"})


def _unlisted(folder: Path) -> None:
    write_weights(folder, llama(False), shards=2)
    placed = _index(folder)
    del placed["model.norm.weight"]
    _write_index(folder, placed)


def _twice(folder: Path) -> None:
    write_weights(folder, llama(False), shards=2)
    placed = _index(folder)
    name = "model.norm.weight"
    other = next(file for file in sorted(set(placed.values())) if file != placed[name])
    save_file(load_file(folder / other) | {name: torch.zeros(16)}, folder / other, {"format": "pt"})


def _two_models(folder: Path) -> None:
    write_weights(folder, llama(False), shards=2)
    write_weights(folder, llama(False), lambda tensors: tensors["model.norm.weight"].mul_(2))


def _index_of_one(folder: Path) -> None:
    write_weights(folder, llama(False))
    names = llama(False).state_dict()
    _write_index(folder, dict.fromkeys(names, "model.safetensors"))


def _beside(folder: Path) -> None:
    write_weights(folder, llama(False))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    (folder / "original").mkdir()
    (folder / "consolidated.safetensors").write_bytes(b"no weights")


def _adapter(folder: Path) -> None:
    write_weights(folder, llama(False))
    fields = {"peft_type": "LORA", "base_model_name_or_path": "x", "r": 1}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def _other_file(folder: Path) -> None:
    write_weights(folder, llama(False))
    save_file({"a": torch.ones(1)}, folder / "other.safetensors", {"format": "pt"})
    _set(folder, transformers_weights="other.safetensors")


def _cut(folder: Path) -> None:
    write_weights(folder, llama(False))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def _wrong_shape(folder: Path) -> None:
    write_weights(folder, llama(False))
    _set(folder, vocab_size=65)


HALF = torch.bfloat16
WEIGHT_FOLDERS = (
    WeightFolder("tied", lambda f: write_weights(f, llama(True))),
    WeightFolder("untied", lambda f: write_weights(f, llama(False))),
    WeightFolder("tied, index", lambda f: write_weights(f, llama(True), shards=3)),
    WeightFolder("untied, index", lambda f: write_weights(f, llama(False), shards=3)),
    WeightFolder("untied, bfloat16", lambda f: write_weights(f, llama(False), dtype=HALF)),
    WeightFolder("tied, bfloat16, index",
                 lambda f: write_weights(f, qwen(True), shards=2, dtype=HALF)),
    WeightFolder("qwen2 with biases", lambda f: write_weights(f, qwen(False))),
    WeightFolder("gpt2, tied", lambda f: write_weights(f, gpt2(True))),
    WeightFolder("gpt2, untied, index", lambda f: write_weights(f, gpt2(False), shards=2)),
    WeightFolder("tied with an equal head",
                 lambda f: write_weights(f, llama(True), _with_head(1.0))),
    WeightFolder("tied with an equal head, index",
                 lambda f: write_weights(f, llama(True), _with_head(1.0), 2)),
    WeightFolder("tied with another head",
                 lambda f: write_weights(f, llama(True), _with_head(1.5)), "tie_word_embeddings"),
    WeightFolder("tied with another head, index",
                 lambda f: write_weights(f, qwen(True), _with_head(1.5), 2), "tie_word_embeddings"),
    WeightFolder("tied, only the head", lambda f: write_weights(f, llama(True), _swapped)),
    WeightFolder("untied without a head",
                 lambda f: write_weights(f, llama(False), _without(HEAD)), "lm_head.weight"),
    WeightFolder("extra tensors", lambda f: write_weights(f, llama(False), _more)),
    WeightFolder("extra tensors, tied, index", lambda f: write_weights(f, llama(True), _more, 2)),
    WeightFolder("a tensor is missing",
                 lambda f: write_weights(f, llama(False), _without("model.norm.weight")),
                 "model.norm.weight"),
    WeightFolder("names without prefix", lambda f: write_weights(f, llama(True), _bare)),
    WeightFolder("the index names a tensor that is not there", _lost, "has no tensor"),
    WeightFolder("a tensor that the index does not name", _unlisted, "does not name"),
    WeightFolder("a tensor in two files", _twice, "model.norm.weight in"),
    WeightFolder("two checkpoints", _two_models, "delete the one"),
    WeightFolder("an index of one file", _index_of_one),
    WeightFolder("weights in other formats beside", _beside),
    WeightFolder("an adapter beside", _adapter, "adapter_config.json"),
    WeightFolder("the configuration names another file", _other_file, "transformers_weights"),
    WeightFolder("a cut file", _cut, "cut off"),
    WeightFolder("another vocabulary", _wrong_shape, "model.path"),
)  # fmt: skip
