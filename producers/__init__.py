"""Everything that writes trajectories.

`prompt_source` publishes prompts of the `tasks`. `rollout` is the worker that generates with one of
the `engines`, which may draft from earlier answers (`drafts`). `rewards` runs a task's own code in
separate processes, `scoring` adds late rewards as annotations. `evaluation` measures a version on
held-out prompts. `settings` has the settings of all of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.evaluation import Evaluation, EvaluationPlan, evaluate
    from rollstream.producers.prompt_source import PromptOrder, PromptSource
    from rollstream.producers.settings import RolloutSettings, SamplingSettings, TaskSettings

__all__ = [
    "Evaluation",
    "EvaluationPlan",
    "PromptOrder",
    "PromptSource",
    "RolloutSettings",
    "SamplingSettings",
    "TaskSettings",
    "evaluate",
]

_MODULES = {
    "Evaluation": "evaluation",
    "EvaluationPlan": "evaluation",
    "PromptOrder": "prompt_source",
    "PromptSource": "prompt_source",
    "RolloutSettings": "settings",
    "SamplingSettings": "settings",
    "TaskSettings": "settings",
    "evaluate": "evaluation",
}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


if __name__ == "producers":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.producers", name="producers")
