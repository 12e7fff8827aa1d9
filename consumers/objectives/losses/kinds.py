"""Finds the losses of this folder, and the function of any `trainer.loss`."""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from rollstream.consumers.objectives.losses.base import LossSettings, Surrogate
from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable

NO_LOSSES = {"base", "kinds"}
"""The other modules of this folder."""


@dataclass(frozen=True, slots=True)
class LossKind:
    function: Surrogate
    settings: type[LossSettings]

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self.settings.model_fields)


@cache
def loss_kinds() -> Mapping[str, LossKind]:
    """Returns the loss kinds by name, in alphabetical order: the function named as its file, whose
    parameter `settings` has the class of the loss's own settings.
    """
    names = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])}
    functions: dict[str, Any] = {
        name: getattr(import_module(f"{__package__}.{name}"), name)
        for name in sorted(names - NO_LOSSES)
    }
    return {
        name: LossKind(function, function.__annotations__["settings"])
        for name, function in functions.items()
    }


def settings_of_losses() -> tuple[type[LossSettings], ...]:
    """Returns the settings of losses as bases of one class."""
    classes = {kind.settings for kind in loss_kinds().values()}
    # A class that extends another comes before it; without settings of its own a loss has the base.
    by_depth = sorted(classes, key=lambda settings: (-len(settings.__mro__), settings.__name__))
    return tuple(settings for settings in by_depth if settings is not LossSettings)


@cache
def find_surrogate(name: str) -> Surrogate:
    """Raises `ConfigurationError` if `trainer.loss` is neither built in nor a callable at an import
    path.
    """
    if name in loss_kinds():
        return loss_kinds()[name].function
    if ":" not in name:
        names = ", ".join(loss_kinds())
        raise ConfigurationError(f"trainer.loss: {name!r} is neither of {names} nor 'module:name'")
    return cast(Surrogate, find_callable(name, "trainer.loss"))
