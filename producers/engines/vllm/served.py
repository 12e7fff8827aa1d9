"""A checkpoint's tensor as vLLM serves it: which parameter holds it, and in which rows.

On the CPU vLLM computes with packed copies of matrices and drops most of the plain ones. A packed
copy is read by multiplying the unit matrix with it: each product has one term that is not zero, so
the result has the same bits.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Any

import torch

from rollstream.errors import EngineRefused


@torch.inference_mode()
def served_tensors(model: torch.nn.Module, name: str) -> list[torch.Tensor]:
    """All copies of the tensor that are served. Raises `EngineRefused` where this model stores it
    in a way that is not supported here.
    """
    path, _, kind = name.rpartition(".")
    parent, _, leaf = path.rpartition(".")
    mapping: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    packed = next((whole for whole, parts in mapping.items() if leaf in parts), None)
    try:
        layer: Any = model.get_submodule(f"{parent}.{packed}" if packed else path)
    except AttributeError:
        raise EngineRefused(f"weights: vLLM has no known parameter for {name!r}") from None
    rows = slice(0, getattr(layer, "org_vocab_size", None))  # vocabularies are padded
    if packed is not None:
        parts = mapping[packed]
        sizes = [int(size) for size in layer.output_partition_sizes]
        assert len(sizes) == len(parts), "one part per name"
        begin = sum(sizes[: parts.index(leaf)])
        rows = slice(begin, begin + sizes[parts.index(leaf)])
    return [whole[rows] for whole in _copies(layer, kind)]


def _copies(layer: Any, kind: str) -> list[torch.Tensor]:
    tensor: torch.Tensor = getattr(layer, kind)
    copies = [tensor.detach()] if tensor.numel() else []
    if kind == "weight" and hasattr(layer, "cpu_linear"):
        width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
        unit = torch.eye(width, dtype=tensor.dtype, device=tensor.device)
        copies.append(layer.cpu_linear(unit, tensor, None).t())
    return copies
