"""Engines, which generate tokens for a rollout.

`base` is the contract (`Engine`), `queue` the queue of sequences under all engines with the checks
that they share; `factory` opens an engine by its name. `torch/` is the embedded engine, `vllm/`
drives vLLM in this process, in one of its own or behind a URL, `paced/` computes no model and takes
its step times from a roofline. `randomness` has the random numbers of sampling, `roofline` the
model of a decode step's time, and `profile` measures it on a real engine.

Most modules import torch.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.producers.engines.base import (
        Emission as Emission,
        Engine as Engine,
        EngineOptions as EngineOptions,
        EngineStats as EngineStats,
        GenerationRequest as GenerationRequest,
        UpdateMode as UpdateMode,
        WeightComparison as WeightComparison,
        WeightUpdate as WeightUpdate,
    )
    from rollstream.producers.engines.factory import (
        open_engine as open_engine,
        open_paced as open_paced,
    )
    from rollstream.producers.engines.profile import EngineProfile as EngineProfile
    from rollstream.producers.engines.roofline import Roofline as Roofline

__getattr__ = lazy_exports(__name__)
