"""The description from which `load_task` builds a task; the settings of a run satisfy it.

Reward processes decode it from JSON themselves. They start by the dozen, and importing pydantic
would take as long as all their other imports.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

Option = int | float | bool | str | list[int | float | bool | str]


class PartDescription(Protocol):
    """One task of a mixture (`rollstream.producers.settings.PartSettings`)."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def options(self) -> Mapping[str, Option]: ...


class TaskDescription(Protocol):
    """A task (`rollstream.producers.settings.TaskSettings` documents the fields)."""

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Option]: ...
    @property
    def parts(self) -> Sequence[PartDescription]: ...
    @property
    def template(self) -> Literal["chat", "plain"]: ...
    @property
    def system(self) -> str: ...
    @property
    def tokenizer(self) -> str | None: ...


class PlainPart(msgspec.Struct, frozen=True):
    """`PartSettings` without validation."""

    name: str
    label: str
    weight: float
    options: dict[str, Option]


class PlainTask(msgspec.Struct, frozen=True):
    """`TaskSettings` without validation; other fields of the JSON are ignored."""

    name: str
    options: dict[str, Option]
    parts: tuple[PlainPart, ...]
    template: Literal["chat", "plain"]
    system: str
    tokenizer: str | None
    reward_timeout_s: float
