"""Builds a run's task. Options are the builder's keyword arguments; a parameter `text` gets
tokenizer and chat template. A class with a nested class `Options` is called with `text` and an
`Options` object.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable, nearest
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.tasks.base import Option, PlainPart, PlainTask, Task
from rollstream.producers.tasks.mixture import MixturePart, mix
from rollstream.producers.tasks.text import TaskText

if TYPE_CHECKING:  # needs pydantic; a reward process uses `PlainTask` without it
    from rollstream.producers.settings import PartSettings, TaskSettings

TASKS = {
    "automaton": "rollstream.producers.tasks.automaton:Automaton",
    "dataset": "rollstream.producers.tasks.dataset:Dataset",
    "numbered": "rollstream.producers.tasks.scripted:Numbered",
    "reasoning_gym": "rollstream.producers.tasks.gym:Gym",
    "remainder": "rollstream.producers.tasks.remainder:Remainder",
    "tools": "rollstream.producers.tasks.tool_dialogue:ToolDialogue",
    "scripted": "rollstream.producers.tasks.scripted:Scripted",
}
"""Registered name → builder, imported on use."""
MIXTURE = "mixture"
"""The name of a task whose prompts come from the tasks in `task.parts` (`mixture.py`)."""

_TASK_MEMBERS = ("name", "stop", "tokenizer", "prompt", "held_out", "judge")


def load_task(settings: "TaskSettings | PlainTask", prompt_tokens_max: int | None = None) -> Task:
    """Returns the task; a name with a `:` is imported from the working directory or PYTHONPATH. A
    task of texts refuses or skips prompts longer than `prompt_tokens_max`.
    """
    folder = Path(settings.tokenizer).expanduser() if settings.tokenizer is not None else None
    if settings.template == "plain" and settings.template_values:
        raise ConfigurationError(
            'task.template_values are variables of a chat template: set task.template = "chat", or '
            "remove them"
        )
    tokenizer = TextTokenizer(folder)
    tokenizer.template_values = settings.template_values
    tokenizer.template_date = settings.template_date or ""
    text = TaskText(
        tokenizer, settings.template, settings.system, prompt_tokens_max, settings.verifier_text
    )
    text.environment = settings.environment
    if settings.name != MIXTURE:
        return _build(settings.name, settings.options, text, "task")
    return mix([_part(part, text, place) for place, part in enumerate(settings.parts)])


def largest_token(task: Task, tokens: Sequence[int]) -> int:
    """Returns the largest token of the tokenizer, of its stop tokens and of `tokens`."""
    tokenizer = task.tokenizer()
    size = tokenizer.size
    if isinstance(tokenizer, TextTokenizer):
        # Added tokens (padding, images) do not count until they are used: a model may lack room for
        # them.
        size = max(tokenizer.light.get_vocab(with_added_tokens=False).values(), default=-1) + 1
    return max(size - 1, *task.stop, *tokens)


def too_few_tokens(path: str, size: int, task: str, largest: int) -> ConfigurationError:
    return ConfigurationError(
        f"model.path: {path!r} has {size} tokens, and the tokenizer of task {task!r} uses ids up "
        f"to {largest}: it belongs to another model; a text task uses the model's own if "
        "task.tokenizer is not set"
    )


def task_paths(settings: "TaskSettings | PlainTask") -> tuple[str, ...]:
    """Returns the files that the task reads: the options that its builder names in
    `path_options`.
    """
    paths: list[str] = []
    for part in settings.parts if settings.name == MIXTURE else (settings,):
        option_names: tuple[str, ...] = getattr(_builder(part.name, "task"), "path_options", ())
        option_values = (part.options.get(option) for option in option_names)
        paths += [path for path in option_values if isinstance(path, str) and path]
    return tuple(dict.fromkeys(paths))


def _part(settings: "PartSettings | PlainPart", text: TaskText, place: int) -> MixturePart:
    where = f"task.parts[{place}]"
    if settings.name == MIXTURE:
        raise ConfigurationError(f"{where}.name: a mixture cannot be a part of a mixture")
    own_text = copy(text)  # the tokenizer stays one object
    own_text.options_where = f"{where}.options"
    try:
        task = _build(settings.name, settings.options, own_text, where)
    except ConfigurationError as error:  # a task of its own knows its options by the usual name
        raise ConfigurationError(str(error).replace("task.options", f"{where}.options")) from error
    label = settings.label or settings.options.get("dataset") or settings.name.rpartition(":")[2]
    return MixturePart(str(label), settings.weight, task)


def _build(name: str, options: Mapping[str, Option], text: TaskText, where: str) -> Task:
    build = _builder(name, where)
    options_type: object = getattr(build, "Options", None)
    options_type = options_type if isinstance(options_type, type) else None
    parameters = inspect.signature(options_type or build).parameters
    arguments: dict[str, object] = dict(options)
    _check_options(f"{where}.options of {name}", arguments, parameters)
    _check_kinds(f"{where}.options", arguments, options_type or build)
    if "text" in parameters:
        arguments["text"] = text
    try:
        task = build(text, options_type(**arguments)) if options_type else build(**arguments)
    except TypeError as error:
        raise ConfigurationError(f"{where}.options of {name}: {error}") from error
    missing = [member for member in _TASK_MEMBERS if not hasattr(task, member)]
    if missing:
        raise ConfigurationError(
            f"{where}.name = {name!r} gave a {type(task).__name__} without {', '.join(missing)}; "
            "a task has all of rollstream.producers.tasks.base.Task"
        )
    for member in ("prompt", "held_out", "judge"):
        if inspect.iscoroutinefunction(getattr(task, member)):
            raise ConfigurationError(
                f"{where}.name = {name!r}: {member}() is an `async def`; only reply() may be one"
            )
    return cast(Task, task)


def _check_options(
    where: str, arguments: Mapping[str, object], parameters: Mapping[str, inspect.Parameter]
) -> None:
    accepted = {
        n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    accepted.pop("text", None)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in arguments:
        if option not in accepted and not takes_any:
            known_names = f"; known: {', '.join(sorted(accepted)) or 'none'}"
            raise ConfigurationError(
                f"{where}: no option {option!r}{nearest(option, accepted) or known_names}"
            )
    lacking = [n for n, p in accepted.items() if p.default is p.empty and n not in arguments]
    if lacking:
        raise ConfigurationError(f"{where}: give {', '.join(lacking)}")


_KINDS: Mapping[object, tuple[tuple[type, ...], str]] = {
    str: ((str,), "text"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
}
"""By the annotation of a parameter the types that it takes, and what the error calls them."""


def _check_kinds(where: str, arguments: Mapping[str, object], build: object) -> None:
    try:
        hints = get_type_hints(build)
    except Exception:  # noqa: BLE001 (the names in annotations of a user's code may be anything)
        return
    for option, value in arguments.items():
        kind: Any = hints.get(option)
        types, name = _KINDS.get(kind) or ((object,), "")
        if not isinstance(value, types) or (isinstance(value, bool) and kind in (int, float)):
            raise ConfigurationError(f"{where}.{option} must be {name}, got {value!r}")


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
