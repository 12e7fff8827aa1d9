"""The embedded engine: continuous batching of decoder-only transformers models on CPU and CUDA.

`engine` implements the contract, `batch` the decode steps and `speculative` the same with drafts
(`draft_verify`). `rows` has the state of each row, `kv_cache`, `attention`, `prefill` and
`sampling` the parts of a step. `decoder` is the contract of a model: `llama` with `llama_weights`
computes the Llama and Qwen families, `hf_decoder` any other model; `decoder_factory` chooses.
`weights` and `weight_views` load, patch and read back the served weights.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.producers.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]

_MODULES = {
    "TorchEngine": "engine",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
