"""Writes settings as TOML, with changes by dotted keys (`merged_tables`)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast


def merged_tables(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tables)
    for key, value in changes.items():
        first, _, rest = key.partition(".")
        below = cast(Mapping[str, Any], merged.get(first) or {})
        merged[first] = merged_tables(below, {rest: value}) if rest else value
    return merged


def table_lines(tables: Mapping[str, Any], name: str = "") -> list[str]:
    """Returns the table lines of the table `name` and of the tables in it."""
    plain = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    lines = ["", f"[{name}]"] if name and plain else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        if isinstance(value, dict):
            below = f"{name}.{_key(key)}" if name else _key(key)
            lines += table_lines(cast(Mapping[str, Any], value), below)
    return lines


def _key(key: str) -> str:
    # TOML allows these bare.
    return key if key.replace("_", "a").replace("-", "a").isalnum() else json.dumps(key)


def _value(value: object) -> str:
    if isinstance(value, dict):
        items = cast(Mapping[str, object], value).items()
        return "{ " + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in items) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, cast(Sequence[object], value))) + "]"
    # TOML lacks null; settings accept the text.
    return '"null"' if value is None else json.dumps(value)
