"""Engines, which generate tokens for a rollout.

`base` is the contract (`Engine`), `factory` opens an engine by its name. `torch/` is the embedded
engine, `vllm/` drives vLLM in this process, in one of its own or behind a URL, `paced/` computes no
model and takes its step times from a roofline. `requests` has the checks that all engines share,
`randomness` the random numbers of sampling, `roofline` the model of a decode step's time, and
`profile` measures it on a real engine.

The public names are imported on first use: most modules import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.producers.engines.base import (
        Emission,
        Engine,
        EngineOptions,
        EngineStats,
        GenerationRequest,
        UpdateMode,
        WeightComparison,
        WeightUpdate,
    )
    from rollstream.producers.engines.factory import open_engine, open_paced
    from rollstream.producers.engines.profile import EngineProfile
    from rollstream.producers.engines.roofline import Roofline

__all__ = [
    "Emission",
    "Engine",
    "EngineOptions",
    "EngineProfile",
    "EngineStats",
    "GenerationRequest",
    "Roofline",
    "UpdateMode",
    "WeightComparison",
    "WeightUpdate",
    "open_engine",
    "open_paced",
]

_MODULES = {
    "Emission": "base",
    "Engine": "base",
    "EngineOptions": "base",
    "EngineStats": "base",
    "GenerationRequest": "base",
    "UpdateMode": "base",
    "WeightComparison": "base",
    "WeightUpdate": "base",
    "open_engine": "factory",
    "open_paced": "factory",
    "EngineProfile": "profile",
    "Roofline": "roofline",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
