"""What a task is built from, as `load_task` looks at it: the settings of a run have all of it.

Reward processes decode it from JSON on their own: they start by the dozen, and pydantic would take
as long as everything else that they import.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

Option = int | float | bool | str | list[int | float | bool | str]


class PartDescribed(Protocol):
    """One task of a mixture (`producers.settings.PartSettings`)."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def options(self) -> Mapping[str, Option]: ...


class Described(Protocol):
    """A task (`producers.settings.TaskSettings` says what each field means)."""

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Option]: ...
    @property
    def parts(self) -> Sequence[PartDescribed]: ...
    @property
    def template(self) -> Literal["chat", "plain"]: ...
    @property
    def system(self) -> str: ...
    @property
    def tokenizer(self) -> str | None: ...


class PlainPart(msgspec.Struct, frozen=True):
    """`PartSettings` without its checks."""

    name: str
    label: str
    weight: float
    options: dict[str, Option]


class PlainTask(msgspec.Struct, frozen=True):
    """`TaskSettings` without its checks; other fields of the JSON are ignored."""

    name: str
    options: dict[str, Option]
    parts: tuple[PlainPart, ...]
    template: Literal["chat", "plain"]
    system: str
    tokenizer: str | None
    reward_timeout_s: float
