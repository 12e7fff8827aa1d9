"""Tasks: the prompts, their order, and how an answer is judged.

`base` is the contract, `registry` builds a task by its name or from your own module. Built in:
`remainder` (arithmetic), `scripted` (several turns, and prompts without content), `dataset` (a file
of `rows`), `gym` (reasoning_gym) and `mixture` (several tasks by weight). Tasks of text use `text`
with `text_tokenizer`; the others use `character_tokenizer`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.tasks.base import (
        Document,
        Environment,
        Reply,
        Score,
        Task,
        TaskPrompt,
        Teacher,
        Tokenizer,
        Turns,
    )
    from rollstream.producers.tasks.registry import load_task
    from rollstream.producers.tasks.text import TaskText

__all__ = [
    "Document",
    "Environment",
    "Reply",
    "Score",
    "Task",
    "TaskPrompt",
    "TaskText",
    "Teacher",
    "Tokenizer",
    "Turns",
    "load_task",
]

_MODULES = {
    "Document": "base",
    "Environment": "base",
    "Reply": "base",
    "Score": "base",
    "Task": "base",
    "TaskPrompt": "base",
    "TaskText": "text",
    "Teacher": "base",
    "Tokenizer": "base",
    "Turns": "base",
    "load_task": "registry",
}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
