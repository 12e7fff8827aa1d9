"""LoRA adapters (Hu et al., arXiv 2106.09685) over frozen parameters (the base), under PEFT's
names. An adapter adds s · B·A to the matrix of a linear layer: A (`low`) is rank × inputs, B
(`high`) is outputs × rank, s = alpha / rank.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollstream.errors import ConfigurationError
from rollstream.storage.model_folder.lora_folder import ALL_LINEAR, adapter_tensors
from rollstream.storage.settings import LoraSettings

if TYPE_CHECKING:  # rollouts without a model of transformers need not import it
    from transformers import PreTrainedModel

LOW, HIGH = ".lora_A.weight", ".lora_B.weight"
PREFIX = "base_model.model."
"""PEFT's name of a tensor begins so, before the layer's name."""


def layer_of(name: str) -> str:
    return name.removeprefix(PREFIX).removesuffix(LOW).removesuffix(HIGH)


class HighFactor(nn.Linear):
    """The matrix B of an adapter, times `scaling`, which is s."""

    scaling: float

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight) * self.scaling


@dataclass(frozen=True, slots=True)
class AttachedAdapter:
    """`scaling` is s, `dtype` the type to which the frozen parameters are rounded."""

    config: bytes
    scaling: float
    dtype: torch.dtype


def attach_adapters(
    model: "PreTrainedModel",
    lora: LoraSettings,
    seed: int,
    dtype: torch.dtype,
    base: str,
    start: Path | None = None,
) -> None:
    """Freeze `model` and add an adapter to each target layer; equal arguments give equal weights.
    `start` is the folder of the adapter that they begin with, else B is zero. Raises
    `ConfigurationError` for a target that the model does not have.
    """
    layers = _target_layers(model, lora.targets)
    model.requires_grad_(False)
    # Rounded to the type in which they are published, so that trainer and rollouts compute with the
    # same base. Parameters on the meta device are rounded when they are filled.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)
    scaling = lora.alpha / lora.rank
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.random.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        for layer in layers.values():
            # The constructor draws A as PEFT does: uniformly, within 1 / √inputs.
            layer.lora_A = nn.Linear(layer.in_features, lora.rank, bias=False)
            high = HighFactor(lora.rank, layer.out_features, bias=False)
            high.scaling = scaling
            # An untrained adapter changes nothing.
            nn.init.zeros_(high.weight)
            layer.lora_B = high
            layer.register_forward_hook(_add_low_rank)
    if start is not None:
        _fill(layers, start)
    config = _peft_config(lora, _target_names(model, layers), base)
    vars(model)["attached_adapter"] = AttachedAdapter(config, scaling, dtype)


def _fill(layers: Mapping[str, nn.Linear], start: Path) -> None:
    factors = {
        f"{PREFIX}{name}{suffix}": layer.get_submodule(suffix.split(".")[1]).get_parameter("weight")
        for name, layer in layers.items()
        for suffix in (LOW, HIGH)
    }
    shapes = {name: tuple(factor.shape) for name, factor in factors.items()}
    with torch.no_grad():
        for name, tensor in adapter_tensors(start, shapes).items():
            factors[name].copy_(tensor)


def attached_adapter(model: nn.Module) -> AttachedAdapter | None:
    return vars(model).get("attached_adapter")


def adapter_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {PREFIX + name: tensor for name, tensor in state.items() if _is_adapter(name)}


def base_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not _is_adapter(name)}


def merge_adapter(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scaling: float
) -> dict[str, Tensor]:
    """Returns merged weights; each changed matrix is rounded once, to its type in `base`."""
    merged = dict(base)
    for name, low in adapter.items():
        if name.endswith(LOW):
            layer = name.removesuffix(LOW)
            weight = f"{layer.removeprefix(PREFIX)}.weight"
            product = adapter[layer + HIGH].float() @ low.float()
            merged[weight] = (base[weight].float() + scaling * product).to(base[weight].dtype)
    return merged


def _is_adapter(name: str) -> bool:
    return name.endswith((LOW, HIGH))


def _add_low_rank(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    low, high = layer.get_submodule("lora_A"), layer.get_submodule("lora_B")
    product: Tensor = high(low(inputs[0]))
    return output + product


def _target_layers(model: "PreTrainedModel", targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    head: nn.Module | None = model.get_output_embeddings()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    linear = {
        name: module
        for name, module in _modules(model).items()
        if isinstance(module, nn.Linear) and module is not head
    }
    if targets == (ALL_LINEAR,):
        return linear
    for target in targets:
        if not any(_is_named(name, target) for name in linear):
            endings = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise ConfigurationError(
                f"model.lora.targets: {type(model).__name__} has no linear layer {target!r} below "
                f"its head; it has {', '.join(endings)}, and {ALL_LINEAR!r} alone names all of them"
            )
    return {n: m for n, m in linear.items() if any(_is_named(n, target) for target in targets)}


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType, reportUnknownVariableType]


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _target_names(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """Returns the last parts of the layers' names if those match no other layer, else the full
    ones.
    """
    last = sorted({name.rsplit(".", 1)[-1] for name in layers})
    matched = {name for name in _modules(model) if any(_is_named(name, target) for target in last)}
    return last if matched == set(layers) else sorted(layers)


def _peft_config(lora: LoraSettings, targets: list[str], base: str) -> bytes:
    fields = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return json.dumps(fields, indent=1, sort_keys=True).encode()
