"""Determines which tensors a checkpoint of a model must hold (`expected_tensors`), and where vLLM
serves them (`served_part`) and the factors of adapters (`served_factors`), so that served weights
can be read back and compared.

vLLM packs several tensors of a checkpoint into one parameter, and splits parameters among its
workers. A tensor's part at a worker is therefore a range of rows of that worker's parameter.
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
from rollstream.storage.lora import LOW, layer_of
from rollstream.storage.weights.tensors import untie

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """Holds the `shapes` of a model's tensors by name, in the order of layers, tied ones once;
    `tied` has the other names under which a checkpoint may hold a tensor.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, tuple[str, ...]]

    def own(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Returns the expected tensors among `tensors`, under their names in `shapes`."""
        names = ((name, self._held_as(name, tensors)) for name in self.shapes)
        return {name: tensors[held] for name, held in names if held in tensors}

    def check_own(self, tensors: Tensors) -> None:
        """Raise `EngineRefused` if a tensor of the model is in `tensors` twice, under names that
        the configuration ties, with other memory: only one of them would be served.
        """
        owners = untie(tensors)[1]
        for name, others in self.tied.items():
            held = [each for each in (name, *others) if each in tensors]
            if len({owners.get(each, each) for each in held}) > 1:
                raise EngineRefused(
                    f"weights: the version has {held[0]!r} and another {held[1]!r}, which its "
                    "config.json ties (tie_word_embeddings)"
                )

    def named(self, name: str) -> str:
        """Returns the name in `shapes` of the tensor that a checkpoint calls `name`."""
        return next((mine for mine, others in self.tied.items() if name in others), name)

    def _held_as(self, name: str, tensors: Tensors) -> str:
        names = (name, *self.tied.get(name, ()))
        return next((held for held in names if held in tensors), name)


def expected_tensors(config: PreTrainedConfig) -> ExpectedTensors:
    """Returns the tensors that a checkpoint must hold. They follow from the configuration alone:
    transformers builds the model on the meta device, without memory, and names its tensors. Raises
    `EngineRefused` if transformers has no causal language model for `config`.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EngineRefused(f"{type(config).__name__}: transformers has no causal language model")
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
    """Returns the name of the model class, by which vLLM finds its own."""
    if config.architectures:
        return str(config.architectures[0])
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])


PartState = Literal["differs", "unread", "same", "elsewhere"]
"""The result of reading a worker's part of a tensor back: other bits; memory that cannot be read;
the same bits; or no part of it, because another pipeline stage has the layer.
"""
PART_STATES: tuple[PartState, ...] = ("differs", "unread", "same", "elsewhere")


def combined(states: Collection[PartState]) -> PartState:
    """Returns the result for all these parts: the tensor differs if any part does, and is the same
    only if no part is unread.
    """
    for state in PART_STATES:
        if state in states:
            return state
    return "elsewhere"


@dataclass(frozen=True, slots=True)
class ServedPart:
    """Names a worker's part of a tensor: the `rows` of the parameter `kind` of vLLM's layer."""

    layer: Any
    kind: str
    rows: slice

    @torch.inference_mode()
    def copies(self) -> list[torch.Tensor]:
        """Returns all copies of the part that are served and can be read.

        On the CPU vLLM computes with packed copies of matrices and drops most of the plain ones. A
        packed copy is read by multiplying the unit matrix with it: each sum of products has one
        term that is not zero, so the result has the same bits.
        """
        layer, tensor = self.layer, getattr(self.layer, self.kind)
        copies = [tensor.detach()] if tensor.numel() else []
        if self.kind == "weight" and hasattr(layer, "cpu_linear"):
            width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
            unit = torch.eye(width, dtype=tensor.dtype, device=tensor.device)
            copies.append(layer.cpu_linear(unit, tensor, None).t())
        return [whole[self.rows] for whole in copies]


def served_part(model: torch.nn.Module, name: str) -> ServedPart:
    """Returns the parameter of vLLM that holds this worker's part of a checkpoint's tensor, and the
    rows in it. Raises `EngineRefused` if vLLM's model has no known parameter for it.
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
    """Returns the path of vLLM's layer that contains the layer at `path`, the index of the latter
    in it, and the number of layers that it packs. Index and number are 0 if vLLM does not pack it.
    """
    parent, _, leaf = path.rpartition(".")
    for packed, parts in mapping.items():
        if leaf in parts:
            return f"{parent}.{packed}", parts.index(leaf), len(parts)
    return path, 0, 0


def served_factors(
    manager: Any, adapter: int, name: str, whole: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns all copies of a factor of the adapter with this id, each with the part of the `whole`
    factor that it must equal. vLLM's adapter manager keeps one copy; while the adapter is active, a
    second is in the stacked tensor that decode steps read, with padding. Raises `EngineRefused` if
    there is no copy.
    """
    attribute = "lora_a" if name.endswith(LOW) else "lora_b"
    place, part, count = _packed_place(manager.packed_modules_mapping, layer_of(name))
    kept = manager.list_adapters().get(adapter)
    if kept is None or place not in kept.loras or place not in manager.modules:
        raise EngineRefused(f"weights: vLLM holds no factor {name!r} of the adapter {adapter}")
    factor = getattr(kept.loras[place], attribute)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = [(factor[part] if count else factor, whole)]
    if adapter in manager.lora_index_to_id:
        layer = manager.modules[place]
        stacked = getattr(layer, f"{attribute}_stacked")[part]
        mine = _rank_part(getattr(layer, f"slice_{attribute}"), layer.tp_size, part, count, whole)
        copies.append((stacked[manager.lora_index_to_id.index(adapter), 0], mine))
    return copies


def _rank_part(cut: Any, workers: int, part: int, count: int, whole: torch.Tensor) -> torch.Tensor:
    """Returns the part of a factor that vLLM's layer stacks at this worker."""
    if workers == 1:
        return whole
    return cut([whole if i == part else None for i in range(count)])[part] if count else cut(whole)
