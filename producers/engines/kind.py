"""The engines by their names. A kind imports neither torch nor its engine's library: settings are
checked before anything is loaded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from rollstream.errors import ConfigurationError
from rollstream.import_path import load_option

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from rollstream.producers.engines.base import Engine
    from rollstream.producers.engines.options import EngineOptions
    from rollstream.producers.engines.roofline import Roofline
    from rollstream.producers.engines.settings import RolloutFields
    from rollstream.streams.values import Version

ENGINES: Mapping[str, str] = {
    "torch": "rollstream.producers.engines.torch.kind:TorchKind",
    "vllm": "rollstream.producers.engines.vllm.kind:VllmKind",
    "paced": "rollstream.producers.engines.paced.kind:PacedKind",
}
"""The values of `rollouts.engine`, each with the class of its kind as `module:class`."""

ComputeDevice = Literal["cpu", "cuda"]
FittedDefault = tuple[str, object, str]
"""A setting's key, its default under this engine, and the reason."""


class EngineTables(Protocol):
    @property
    def rollouts(self) -> "RolloutFields": ...


class ServedModel(Protocol):
    """The model to serve. Each call may read a file."""

    def vocabulary(self) -> int: ...

    def config(self) -> "PreTrainedConfig": ...


class EngineKind(ABC):
    """What a run must know of an engine. The defaults describe one on this machine's CPU, in
    float32, without drafts and adapters. `r` are the run's settings of rollouts.
    """

    name: ClassVar[str]
    has_model: ClassVar[bool] = True
    """Whether the weights compute tokens; without, nothing is learned, and no answer is text."""
    module: ClassVar[str] = ""
    """A module that `open` needs and that takes seconds to import."""
    learner: ClassVar[str] = "torch"
    """The value of `trainer.learner` that makes versions for this engine."""
    temperatures: ClassVar[tuple[float, float]] = (0.0, inf)
    """The least and the highest temperature above 0 at which the engine samples."""
    sizes_cache: ClassVar[bool] = False
    """Whether the engine sizes its KV cache; else it has room for all slots."""
    tables: ClassVar[tuple[str, ...]] = ()
    """The begin of the keys of settings that only this engine reads."""

    def package(self, r: "RolloutFields") -> tuple[str, str] | None:
        """Returns the package that must be installed, and the extra that installs it."""
        return None

    def is_server(self, r: "RolloutFields") -> bool:
        """Returns whether a server that the run does not own generates."""
        return False

    def needs(self, r: "RolloutFields") -> frozenset[str]:
        """Returns the features (`streams/release.py`) without which its trajectories would be
        misread.
        """
        return frozenset()

    def can_draft(self, r: "RolloutFields") -> bool:
        return False

    def computes_on(self, r: "RolloutFields") -> frozenset[ComputeDevice]:
        """Returns this machine's devices for a rollout; empty if it computes elsewhere, or
        nothing.
        """
        return frozenset({"cpu"})

    def is_on_cpu(self, r: "RolloutFields") -> bool:
        """Returns whether a rollout computes on this machine's CPU, whatever else is there."""
        devices = self.computes_on(r)
        return "cpu" in devices and "cuda" not in devices

    def cards(self, r: "RolloutFields") -> int:
        """Returns the number of GPUs that one engine takes where it computes on GPUs."""
        return 1

    def memory_share(self, r: "RolloutFields") -> float:
        """Returns the share of a GPU's memory that the engine reserves at its start."""
        return 0.0

    def dtype(self, r: "RolloutFields") -> str:
        """Returns the type in which layers compute, `auto` if the device decides."""
        return "float32"

    def device(self, r: "RolloutFields") -> str | None:
        """Returns None if the engine chooses. Raises `ConfigurationError` for a device that this
        process does not see.
        """
        return None

    def timed_settings(self, r: "RolloutFields") -> Mapping[str, object]:
        """Returns the settings that affect step times and differ from their defaults."""
        return {}

    def adapter_problem(self, r: "RolloutFields") -> tuple[str, str] | None:
        """Returns the setting that keeps the engine from serving LoRA adapters, and its required
        value.
        """
        must = "must be 'torch' or 'vllm' with model.lora.rank > 0: they serve adapters"
        return "rollouts.engine", must

    def fitted_defaults(self, value: Callable[[str], object]) -> Iterator[FittedDefault]:
        """Yields the defaults that this engine changes; `value` gives a setting by its key, before
        validation.
        """
        yield from ()

    def evaluating(self, r: "RolloutFields") -> "EngineKind":
        """Returns the kind of the engine that an evaluation opens in its own process."""
        return self

    def import_ahead(self) -> None:
        if self.module:
            import_module(self.module)

    def check_model(self, model: "PreTrainedModel", context_max: int, is_adapted: bool) -> None:
        """Raise `EngineRefused` for a model, which may be on the meta device, that the engine would
        not serve.
        """
        return

    def context_bound(self, fields: Mapping[str, object]) -> int | None:
        """Returns the longest sequence, in tokens, by the model's `config.json`; None for all that
        the model takes.
        """
        return None

    def roofline(self, c: EngineTables) -> "Roofline | None":
        """Returns the step times, in seconds of the engine's clock; None if they must be
        measured.
        """
        return None

    @abstractmethod
    def open(
        self,
        c: EngineTables,
        model: ServedModel,
        tensors: "Mapping[str, torch.Tensor]",
        version: "Version",
        options: "EngineOptions",
    ) -> "Engine":
        """Raises `ConfigurationError` for an engine that is not installed, and `EngineRefused` for
        a model that it cannot serve.
        """


@cache
def engine_kind(name: str) -> EngineKind:
    """Returns the kind of this engine. Raises `ConfigurationError` for an unknown name."""
    if name not in ENGINES:
        raise ConfigurationError(f"rollouts.engine must be one of {', '.join(ENGINES)}: {name!r}")
    kind: type[EngineKind] = load_option(ENGINES[name])
    return kind()


def has_model(recorded: object) -> bool:
    """Returns whether the engine of this recorded name has a model; an unknown one counts as
    such.
    """
    is_known = isinstance(recorded, str) and recorded in ENGINES
    return not is_known or engine_kind(recorded).has_model
