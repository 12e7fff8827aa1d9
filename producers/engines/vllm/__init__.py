"""vLLM as an engine. Importing this package imports nothing of vLLM; `release` alone imports it.

`engine` implements the contract on the calls of `protocol`, which `core` implements for a vLLM of
this machine and `remote/` for a server by URL. `environment` has the supported release and the size
of an engine. `weights`, `staging`, `transfer` and `parameter_map` load and read back weights;
`drafts`, `proposer` and `proposer_speculation` make drafts. `worker` and `transfer` run inside
vLLM's workers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.producers.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]

_MODULES = {
    "VllmEngine": "engine",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
