"""Builds the task of a run by its registered name, or by `module:attribute` for your own, from the
working directory or PYTHONPATH.

A builder gets the task's options as keyword arguments. If it has a parameter `text`, it gets the
run's tokenizer and chat template (`text.py`) there. A class with a class `Options` gets `text` and
one value of that class instead. A mistake raises `ConfigurationError`, which
names the setting and what was found instead; nothing is guessed.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable, nearest
from rollstream.producers.tasks.base import Option, PlainPart, PlainTask, Task
from rollstream.producers.tasks.mixture import MixturePart, mix
from rollstream.producers.tasks.text import TaskText
from rollstream.producers.tasks.text_tokenizer import TextTokenizer

if TYPE_CHECKING:  # pydantic: a reward process decodes `PlainTask`
    from rollstream.producers.settings import PartSettings, TaskSettings

TASKS = {
    "dataset": "rollstream.producers.tasks.dataset:Dataset",
    "numbered": "rollstream.producers.tasks.scripted:Numbered",
    "reasoning_gym": "rollstream.producers.tasks.gym:Gym",
    "remainder": "rollstream.producers.tasks.remainder:Remainder",
    "scripted": "rollstream.producers.tasks.scripted:Scripted",
}
"""Registered name → builder, imported on use."""
MIXTURE = "mixture"

_PARTS = ("name", "stop", "tokenizer", "prompt", "held_out", "judge")


def load_task(settings: "TaskSettings | PlainTask", prompt_tokens_max: int | None = None) -> Task:
    """The task that the settings describe.

    `settings.tokenizer` is the folder with a text task's tokenizer; None is the built-in byte-level
    tokenizer. The task refuses or skips prompts longer than `prompt_tokens_max`.
    """
    folder = Path(settings.tokenizer) if settings.tokenizer is not None else None
    tokenizer = TextTokenizer(folder)
    text = TaskText(tokenizer, settings.template, settings.system, prompt_tokens_max)
    if settings.name != MIXTURE:
        return _build(settings.name, settings.options, text, "task")
    return mix([_part(part, text, place) for place, part in enumerate(settings.parts)])


def _part(settings: "PartSettings | PlainPart", text: TaskText, place: int) -> MixturePart:
    where = f"task.parts[{place}]"
    if settings.name == MIXTURE:
        raise ConfigurationError(f"{where}.name: a mixture cannot be a part of a mixture")
    task = _build(settings.name, settings.options, text, where)
    label = settings.label or settings.options.get("dataset") or settings.name.rpartition(":")[2]
    return MixturePart(str(label), settings.weight, task)


def _build(name: str, options: Mapping[str, Option], text: TaskText, where: str) -> Task:
    build = _builder(name, where)
    options_type: object = getattr(build, "Options", None)
    options_type = options_type if isinstance(options_type, type) else None
    known = inspect.signature(options_type or build).parameters
    given: dict[str, object] = dict(options)
    _check_options(f"{where}.options of {name}", given, known)
    if "text" in known:
        given["text"] = text
    try:
        task = build(text, options_type(**given)) if options_type else build(**given)
    except TypeError as error:
        raise ConfigurationError(f"{where}.options of {name}: {error}") from error
    missing = [part for part in _PARTS if not hasattr(task, part)]
    if missing:
        raise ConfigurationError(
            f"{where}.name = {name!r} gave a {type(task).__name__} without {', '.join(missing)}; "
            "a task has all of rollstream.producers.tasks.base.Task"
        )
    return cast(Task, task)


def _check_options(
    where: str, given: Mapping[str, object], known: Mapping[str, inspect.Parameter]
) -> None:
    """Check the options against the builder's signature before the call."""
    named = {n: p for n, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named.pop("text", None)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for option in given:
        if option not in named and not takes_any:
            has = f"; known: {', '.join(sorted(named)) or 'none'}"
            raise ConfigurationError(
                f"{where}: no option {option!r}{nearest(option, named) or has}"
            )
    lacking = [n for n, p in named.items() if p.default is p.empty and n not in given]
    if lacking:
        raise ConfigurationError(f"{where}: give {', '.join(lacking)}")


def _builder(name: str, where: str) -> Callable[..., object]:
    if ":" in name or name in TASKS:
        return find_callable(TASKS.get(name, name), f"{where}.name")
    registered = (*TASKS, MIXTURE)
    hint = (
        nearest(name, registered, cutoff=0.4) or f"; registered: {', '.join(sorted(registered))}."
    )
    raise ConfigurationError(
        f"{where}.name = {name!r} is not registered{hint} Name your own as `module:attribute`."
    )
