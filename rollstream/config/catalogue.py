"""Every setting with its type, default, scope and meaning, read from the settings' own classes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rollstream.config.config import setting_scope
from rollstream.config.settings import Configuration
from rollstream.storage.settings import Settings

LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
TYPE_NAMES: dict[Any, str] = {
    str: "text", int: "integer", float: "number", bool: "boolean", NoneType: "null",
    list: "list",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """A setting. `limits` begins with a space or is empty; `default` is JSON or `required`;
    `change` states whether it may change between two starts of a run: yes, accepted, no.
    """

    key: str
    kind: str
    limits: str
    default: str
    change: str
    meaning: str


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """The settings of one table, without those of the tables below it."""

    name: str
    meaning: str
    settings: tuple[SettingEntry, ...]


def setting_tables(
    name: str = "", model: type[Settings] = Configuration
) -> Iterator[SettingsTable]:
    """Yields the table and every table below it, in the order of their classes."""
    prefix = f"{name}." if name else ""
    plain: list[SettingEntry] = []
    below: dict[str, type[Settings]] = {}
    for key, field in model.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Settings):
            below[f"{prefix}{key}"] = kind
        else:
            plain += _entries(f"{prefix}{key}", field)
    yield SettingsTable(name, plain_text(model.__doc__), tuple(plain))
    for inner, kind in below.items():
        yield from setting_tables(inner, kind)


def type_text(annotation: Any) -> str:
    """A type in the terms of TOML and JSON; values are in backquotes."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(one)}`" for one in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_text(one) for one in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {type_text(arguments[0])}"
        return f"list of {len(arguments)} {type_text(arguments[0])}"
    if origin is dict:
        return f"table of {type_text(arguments[1])}"
    if origin is Annotated:
        return type_text(arguments[0])
    return TYPE_NAMES.get(annotation) or f"`{annotation.__name__}`"


def plain_text(text: str | None) -> str:
    """A docstring on one line."""
    return " ".join((text or "").split())


def _entries(key: str, field: FieldInfo) -> Iterator[SettingEntry]:
    """Yields the setting, and for a list of tables the settings of its items."""
    items = [one for one in get_args(field.annotation) if isinstance(one, type)]
    item = next((one for one in items if issubclass(one, Settings)), None)
    found = [
        f"{sign} {getattr(one, name):g}"
        for name, sign in LIMITS.items()
        for one in field.metadata
        if getattr(one, name, None) is not None
    ]
    default: Any = None if field.is_required() else field.get_default(call_default_factory=True)
    yield SettingEntry(
        key,
        f"tables `[[{key}]]`" if item else type_text(field.annotation),
        f" {', '.join(found)}" if found else "",
        "required" if field.is_required() else json.dumps(default),
        setting_scope(key).value,
        plain_text(field.description),
    )
    for name, inner in item.model_fields.items() if item else ():
        yield from _entries(f"{key}.{name}", inner)
