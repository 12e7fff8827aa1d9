"""Builds the task of a run from its settings (`load_task`): a registered task (`TASKS`), a user's
own by `module:attribute`, or a mixture of several of these.

The name stands for a builder, a function or class that returns the task. The options are its
keyword arguments; a parameter `text` receives the run's tokenizer and chat template (`text.py`). A
class with a nested class `Options` is called with `text` and an `Options` object instead. A wrong
name or option raises `ConfigurationError`, which names the setting and the wrong value.
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

if TYPE_CHECKING:  # needs pydantic; a reward process uses `PlainTask` without it
    from rollstream.producers.settings import PartSettings, TaskSettings

TASKS = {
    "automaton": "rollstream.producers.tasks.automaton:Automaton",
    "dataset": "rollstream.producers.tasks.dataset:Dataset",
    "numbered": "rollstream.producers.tasks.scripted:Numbered",
    "reasoning_gym": "rollstream.producers.tasks.gym:Gym",
    "remainder": "rollstream.producers.tasks.remainder:Remainder",
    "scripted": "rollstream.producers.tasks.scripted:Scripted",
}
"""Registered name → builder, imported on use."""
MIXTURE = "mixture"
"""The name of a task whose prompts come from the tasks in `task.parts` (`mixture.py`)."""

_TASK_MEMBERS = ("name", "stop", "tokenizer", "prompt", "held_out", "judge")


def load_task(settings: "TaskSettings | PlainTask", prompt_tokens_max: int | None = None) -> Task:
    """Returns the task that the settings describe. A name with a `:` is imported from the working
    directory or PYTHONPATH.

    `settings.tokenizer` is the folder of a text task's tokenizer; None selects the built-in
    byte-level tokenizer. A task of texts refuses or skips prompts longer than `prompt_tokens_max`.
    """
    folder = Path(settings.tokenizer) if settings.tokenizer is not None else None
    tokenizer = TextTokenizer(folder)
    text = TaskText(tokenizer, settings.template, settings.system, prompt_tokens_max)
    if settings.name != MIXTURE:
        return _build(settings.name, settings.options, text, "task")
    return mix([_part(part, text, place) for place, part in enumerate(settings.parts)])


def task_paths(settings: "TaskSettings | PlainTask") -> tuple[str, ...]:
    """Returns the files that the task reads, as its options give them. A builder names these
    options in its attribute `path_options`.
    """
    found: list[str] = []
    for part in settings.parts if settings.name == MIXTURE else (settings,):
        named: tuple[str, ...] = getattr(_builder(part.name, "task"), "path_options", ())
        given = (part.options.get(option) for option in named)
        found += [path for path in given if isinstance(path, str) and path]
    return tuple(dict.fromkeys(found))


def _part(settings: "PartSettings | PlainPart", text: TaskText, place: int) -> MixturePart:
    """Build the task number `place` of a mixture. Its label is the configured one, else its option
    `dataset`, else its name.
    """
    where = f"task.parts[{place}]"
    if settings.name == MIXTURE:
        raise ConfigurationError(f"{where}.name: a mixture cannot be a part of a mixture")
    task = _build(settings.name, settings.options, text, where)
    label = settings.label or settings.options.get("dataset") or settings.name.rpartition(":")[2]
    return MixturePart(str(label), settings.weight, task)


def _build(name: str, options: Mapping[str, Option], text: TaskText, where: str) -> Task:
    """Call the builder of this name, and check that the result has the members of a task. Errors
    name the settings by their table `where`.
    """
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
    missing = [member for member in _TASK_MEMBERS if not hasattr(task, member)]
    if missing:
        raise ConfigurationError(
            f"{where}.name = {name!r} gave a {type(task).__name__} without {', '.join(missing)}; "
            "a task has all of rollstream.producers.tasks.base.Task"
        )
    return cast(Task, task)


def _check_options(
    where: str, given: Mapping[str, object], known: Mapping[str, inspect.Parameter]
) -> None:
    """Raise `ConfigurationError` for an option that the builder does not take, or one that it needs
    and was not given.
    """
    named = {n: p for n, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named.pop("text", None)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for option in given:
        if option not in named and not takes_any:
            known_names = f"; known: {', '.join(sorted(named)) or 'none'}"
            raise ConfigurationError(
                f"{where}: no option {option!r}{nearest(option, named) or known_names}"
            )
    lacking = [n for n, p in named.items() if p.default is p.empty and n not in given]
    if lacking:
        raise ConfigurationError(f"{where}: give {', '.join(lacking)}")


def _builder(name: str, where: str) -> Callable[..., object]:
    """Import and return the builder; raises `ConfigurationError` for an unknown name."""
    if ":" in name or name in TASKS:
        return find_callable(TASKS.get(name, name), f"{where}.name")
    registered = (*TASKS, MIXTURE)
    hint = (
        nearest(name, registered, cutoff=0.4) or f"; registered: {', '.join(sorted(registered))}."
    )
    raise ConfigurationError(
        f"{where}.name = {name!r} is not registered{hint} Name your own as `module:attribute`."
    )
