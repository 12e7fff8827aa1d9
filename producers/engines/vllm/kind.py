"""vLLM as an engine, before it is opened (`VllmKind`). Nothing of vLLM is imported."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rollstream.producers.engines.kind import (
    ComputeDevice,
    EngineKind,
    EngineTables,
    FittedDefault,
    ServedModel,
    engine_kind,
)
from rollstream.producers.engines.vllm.local.protocol import TEMPERATURES

if TYPE_CHECKING:
    import torch

    from rollstream.producers.engines.base import Engine
    from rollstream.producers.engines.options import EngineOptions
    from rollstream.producers.engines.settings import RolloutFields
    from rollstream.streams.values import Version

_TIMED = {"dtype", "tensor_parallel", "head_float32", "args"}


class VllmKind(EngineKind):
    name = "vllm"
    temperatures = TEMPERATURES
    sizes_cache = True
    tables = ("rollouts.vllm.",)

    def package(self, r: "RolloutFields") -> tuple[str, str] | None:
        return None if self.is_server(r) else ("vllm", "vllm")

    def is_server(self, r: "RolloutFields") -> bool:
        return r.vllm.url is not None

    def can_draft(self, r: "RolloutFields") -> bool:
        return not self.is_server(r)  # the server's owner decides on its drafts

    def computes_on(self, r: "RolloutFields") -> frozenset[ComputeDevice]:
        return frozenset() if self.is_server(r) else frozenset({"cuda"})

    def cards(self, r: "RolloutFields") -> int:
        stages = r.vllm.args.get("pipeline_parallel_size", 1)
        return r.vllm.tensor_parallel * (stages if isinstance(stages, int) else 1)

    def memory_share(self, r: "RolloutFields") -> float:
        return r.vllm.memory_share

    def dtype(self, r: "RolloutFields") -> str:
        return r.vllm.dtype

    def timed_settings(self, r: "RolloutFields") -> Mapping[str, object]:
        return r.vllm.model_dump(include=_TIMED, exclude_defaults=True)

    def adapter_problem(self, r: "RolloutFields") -> tuple[str, str] | None:
        if not self.is_server(r):
            return None
        must = "must not be set with model.lora.rank > 0: a server by URL serves no adapters"
        return "rollouts.vllm.url", must

    def fitted_defaults(self, value: Callable[[str], object]) -> Iterator[FittedDefault]:
        if value("rollouts.vllm.url") is not None:
            yield "rollouts.count", 1, "rollouts.vllm.url: one for each server"

    def evaluating(self, r: "RolloutFields") -> EngineKind:
        # A server serves rollouts only, so an evaluation loads an engine of its own.
        return engine_kind("torch") if self.is_server(r) else self

    def open(
        self,
        c: EngineTables,
        model: ServedModel,
        tensors: "Mapping[str, torch.Tensor]",
        version: "Version",
        options: "EngineOptions",
    ) -> "Engine":
        from rollstream.producers.engines.vllm.engine import VllmEngine

        return VllmEngine(model.config(), tensors, version, options, settings=c.rollouts.vllm)
