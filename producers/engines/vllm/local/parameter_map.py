"""Where vLLM serves a checkpoint's tensors: it packs several into one parameter and splits
parameters among workers, so a worker's part is a range of a parameter's rows.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from rollstream.errors import EngineRefused
from rollstream.storage.model_folder.lora import LOW, layer_of
from rollstream.storage.weights.tensors import untie

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """`shapes` by name, in the order of layers, tied ones once; `tied` has their other names."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, tuple[str, ...]]

    def own(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        names = ((name, self._held_as(name, tensors)) for name in self.shapes)
        return {name: tensors[stored_name] for name, stored_name in names if stored_name in tensors}

    def check_own(self, tensors: Tensors) -> None:
        """Raise `EngineRefused` if a tensor is there twice, under tied names, with other memory."""
        owners = untie(tensors)[1]
        for name, others in self.tied.items():
            aliases = [each for each in (name, *others) if each in tensors]
            if len({owners.get(each, each) for each in aliases}) > 1:
                # Only one of them would be served.
                raise EngineRefused(
                    f"weights: the version has {aliases[0]!r} and another {aliases[1]!r}, which "
                    "its config.json ties (tie_word_embeddings)"
                )

    def named(self, name: str) -> str:
        return next((mine for mine, others in self.tied.items() if name in others), name)

    def _held_as(self, name: str, tensors: Tensors) -> str:
        names = (name, *self.tied.get(name, ()))
        return next((alias for alias in names if alias in tensors), name)


def expected_tensors(config: PreTrainedConfig) -> ExpectedTensors:
    """Returns the tensors by the configuration alone. Raises `EngineRefused` if transformers has no
    causal language model for it.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EngineRefused(f"{type(config).__name__}: transformers has no causal language model")
    # transformers names the tensors without memory for them.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    first: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner == name:
            shapes[name] = tuple(parameter.shape)
        else:
            tied[owner] = (*tied.get(owner, ()), name)
    return ExpectedTensors(shapes, tied)


def architecture_of(config: PreTrainedConfig) -> str:
    if config.architectures:
        return str(config.architectures[0])
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])


PartState = Literal["differs", "unread", "same", "elsewhere"]
"""Of a worker's part: other bits; unreadable memory; the same bits; or the layer is in another
pipeline stage.
"""
PART_STATES: tuple[PartState, ...] = ("differs", "unread", "same", "elsewhere")


def combined(states: Collection[PartState]) -> PartState:
    """Returns `differs` if any part does, and `same` only if no part is unread."""
    for state in PART_STATES:
        if state in states:
            return state
    return "elsewhere"


@dataclass(frozen=True, slots=True)
class ServedPart:
    """The `rows` of the parameter `kind` of vLLM's layer."""

    layer: Any
    kind: str
    rows: slice

    @torch.inference_mode()
    def copies(self) -> list[torch.Tensor]:
        layer, tensor = self.layer, getattr(self.layer, self.kind)
        copies = [tensor.detach()] if tensor.numel() else []
        if self.kind == "weight" and hasattr(layer, "cpu_linear"):
            # On the CPU vLLM computes with packed copies of matrices and drops most of the plain
            # ones. A packed copy is read by multiplying the unit matrix with it: each sum has one
            # term that is not zero, so the result has the same bits.
            width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
            unit = torch.eye(width, dtype=tensor.dtype, device=tensor.device)
            copies.append(layer.cpu_linear(unit, tensor, None).t())
        return [copy[self.rows] for copy in copies]


def served_part(model: torch.nn.Module, name: str) -> ServedPart:
    """Returns this worker's part of a checkpoint's tensor. Raises `EngineRefused` if vLLM's model
    has no known one.
    """
    path, _, kind = name.rpartition(".")
    mapping: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    place, index, count = _packed_place(mapping, path)
    try:
        layer: Any = model.get_submodule(place)
    except AttributeError:
        raise EngineRefused(f"weights: vLLM has no known parameter for {name!r}") from None
    layer = getattr(layer, "base_layer", layer)  # below adapters
    vocabulary = getattr(layer, "shard_indices", None)  # vocabularies are padded
    rows = slice(0, None if vocabulary is None else vocabulary.num_org_elements)
    if count:
        sizes = [int(size) for size in layer.output_partition_sizes]
        assert len(sizes) == count, "one part per name"
        begin = sum(sizes[:index])
        rows = slice(begin, begin + sizes[index])
    return ServedPart(layer, kind, rows)


def _packed_place(mapping: Mapping[str, Sequence[str]], path: str) -> tuple[str, int, int]:
    parent, _, leaf = path.rpartition(".")
    # The path of vLLM's layer, the index in it, and the number of layers that it packs (0: not
    # packed).
    for packed, parts in mapping.items():
        if leaf in parts:
            return f"{parent}.{packed}", parts.index(leaf), len(parts)
    return path, 0, 0


def served_factors(
    manager: Any, adapter: int, name: str, tensor: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns all copies of an adapter's factor, each with the part of `tensor` that it must equal.
    Raises `EngineRefused` if there is none.
    """
    attribute = "lora_a" if name.endswith(LOW) else "lora_b"
    place, part, count = _packed_place(manager.packed_modules_mapping, layer_of(name))
    loaded = manager.list_adapters().get(adapter)
    if loaded is None or place not in loaded.loras or place not in manager.modules:
        raise EngineRefused(f"weights: vLLM holds no factor {name!r} of the adapter {adapter}")
    factor = getattr(loaded.loras[place], attribute)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = [(factor[part] if count else factor, tensor)]
    # While the adapter is active, a second copy is in the stacked tensor that decode steps read,
    # with padding.
    if adapter in manager.lora_index_to_id:
        layer = manager.modules[place]
        stacked = getattr(layer, f"{attribute}_stacked")[part]
        mine = _rank_part(getattr(layer, f"slice_{attribute}"), layer.tp_size, part, count, tensor)
        copies.append((stacked[manager.lora_index_to_id.index(adapter), 0], mine))
    return copies


def _rank_part(cut: Any, workers: int, part: int, count: int, tensor: torch.Tensor) -> torch.Tensor:
    if workers == 1:
        return tensor
    return (
        cut([tensor if i == part else None for i in range(count)])[part] if count else cut(tensor)
    )
