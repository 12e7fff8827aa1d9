"""Finds a task by its registered name, or by `module:attribute` for one's own.

A mistake is a ConfigurationError that names what was found instead; nothing is guessed.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import cast

from producers.tasks.base import Task
from streams.errors import ConfigurationError

TASKS = {
    "remainder": "producers.tasks.remainder:Remainder",
    "scripted": "producers.tasks.scripted:Scripted",
}
"""Registered name → where the task is built; imported when asked for."""

_PARTS = ("name", "stop", "tokenizer", "prompt", "held_out", "judge")

Option = int | float | bool | str


def load_task(name: str, options: Mapping[str, Option]) -> Task:
    """The task called `name`, built with its options as keyword arguments."""
    build = _builder(name)
    try:
        task = build(**options)
    except TypeError as error:
        raise ConfigurationError(
            f"task.options of {name}: {error}; given: {sorted(options)}"
        ) from error
    missing = [part for part in _PARTS if not hasattr(task, part)]
    if missing:
        raise ConfigurationError(
            f"task.name = {name!r} gave a {type(task).__name__} without {', '.join(missing)}; "
            "a task has all of producers.tasks.base.Task"
        )
    return cast(Task, task)


def _builder(name: str) -> Callable[..., object]:
    module_name, colon, attribute = TASKS.get(name, name).partition(":")
    if not colon:
        near = get_close_matches(name, TASKS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"registered: {', '.join(sorted(TASKS))}."
        raise ConfigurationError(
            f"task.name = {name!r} is not registered: {hint} "
            "One's own is given as `module:attribute`."
        )
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"task.name = {name!r}: module {module_name!r} cannot be imported ({error}); "
            "is its folder on PYTHONPATH?"
        ) from error
    build = getattr(module, attribute, None)
    if not callable(build):
        near = get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(
            f"task.name = {name!r}: {module_name} has no callable {attribute!r}{hint}"
        )
    return build
