"""The engine without a model, before it is opened (`PacedKind`)."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, cast

from rollstream.producers.engines.kind import (
    ComputeDevice,
    EngineKind,
    EngineTables,
    FittedDefault,
    ServedModel,
)

if TYPE_CHECKING:
    import torch

    from rollstream.producers.engines.base import Engine
    from rollstream.producers.engines.options import EngineOptions
    from rollstream.producers.engines.paced_settings import PacedSettings
    from rollstream.producers.engines.roofline import Roofline
    from rollstream.producers.engines.settings import RolloutFields
    from rollstream.streams.values import Version


class _PacedTables(EngineTables, Protocol):
    @property
    def paced(self) -> "PacedSettings": ...


class PacedKind(EngineKind):
    name = "paced"
    has_model = False
    learner = "paced"

    def computes_on(self, r: "RolloutFields") -> frozenset[ComputeDevice]:
        return frozenset()

    def fitted_defaults(self, value: Callable[[str], object]) -> Iterator[FittedDefault]:
        yield "trainer.learner", self.learner, "rollouts.engine = 'paced'"
        yield "evaluation.enabled", False, "rollouts.engine = 'paced', which writes no answers"

    def roofline(self, c: EngineTables) -> "Roofline":
        from rollstream.producers.engines.paced.build import roofline_from

        return roofline_from(cast(_PacedTables, c).paced.roofline)

    def open(
        self,
        c: EngineTables,
        model: ServedModel,
        tensors: "Mapping[str, torch.Tensor]",
        version: "Version",
        options: "EngineOptions",
    ) -> "Engine":
        from rollstream.producers.engines.paced.build import open_paced

        return open_paced(
            cast(_PacedTables, c).paced,
            model.vocabulary(),
            tensors,
            version,
            slots=options.slots,
            context_max=options.context_max,
        )
