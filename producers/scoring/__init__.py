"""Scorers: late rewards and other facts about finished trajectories, written as annotations.

`scorer` reads trajectories as a consumer group and publishes the annotations. `functions` loads a
scorer's function and defines the finished trajectory that it gets (`docs/late-rewards.md`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.scoring.functions import Finished, ScoringFunction
    from rollstream.producers.scoring.scorer import AnnotationPlan, Scorer

__all__ = ["AnnotationPlan", "Finished", "Scorer", "ScoringFunction"]

_MODULES = {
    "AnnotationPlan": "scorer",
    "Finished": "functions",
    "Scorer": "scorer",
    "ScoringFunction": "functions",
}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
