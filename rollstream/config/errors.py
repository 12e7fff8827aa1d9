"""Formats configuration errors as one line each: the setting, its requirement, the given value and
its source.

No line shows a secret: values of keys that look like one, and credentials inside URLs, are left
out.
"""

import re
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollstream.config.sources import REMOVED_SETTINGS, SettingLayers, setting_types

VALUE_CHARACTERS_MAX = 80
_SECRET = re.compile(r"password|secret|token$|api_?key|credential", re.IGNORECASE)
_USERINFO = re.compile(r"//[^/@\s]*@")
_BOUNDS = {
    "greater_than_equal": ("≥", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("≤", "le"),
    "less_than": ("<", "lt"),
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
}


def error_line(key: str, must: str, value: Any, layers: SettingLayers) -> str:
    """`groups_per_step must be ≥ 1, got 0 (trainer.groups_per_step in run.toml)`."""
    name = key.rsplit(".", 1)[-1]
    return (
        f"{name} {must}, got {printable_value(key, value)} ({key} in {setting_origin(key, layers)})"
    )


def error_lines(error: ValidationError, layers: SettingLayers, model: type[BaseModel]) -> str:
    """One line per error, in the order of the settings."""
    lines: dict[str, str] = {}
    for details in error.errors(include_url=False):
        key = _key(details["loc"], model)
        lines.setdefault(
            key, _line(key, details, layers, model)
        )  # a union has one error per member
    return "\n".join(lines.values())


def setting_origin(key: str, layers: SettingLayers) -> str:
    """The source of a setting; for a table, the source of any setting in it."""
    inside = (where for name, where in layers.origins.items() if name.startswith(f"{key}."))
    return layers.origins.get(key.partition("[")[0]) or next(inside, "the defaults")


def printable_value(key: str, value: Any) -> str:
    """The value as it may be printed."""
    if _SECRET.search(key):
        return "(not shown)"
    text = _USERINFO.sub("//***@", "null" if value is None else repr(value))
    return text if len(text) <= VALUE_CHARACTERS_MAX else text[:VALUE_CHARACTERS_MAX] + "…"


def nearest_key(key: str, known: list[str]) -> str | None:
    """The known key that was probably meant: the same name in another table, a close spelling in
    its own table, or a close spelling in another one.
    """
    table, _, name = key.rpartition(".")
    own = [k for k in known if k.rpartition(".")[0] == table]
    same = [k for k in known if k.rpartition(".")[2] == name]
    return next(iter([*same, *_similar_keys(name, own), *_similar_keys(name, known)]), None)


def _similar_keys(name: str, known: list[str]) -> list[str]:
    by_name = {k.rpartition(".")[2]: k for k in known}
    return [by_name[close] for close in get_close_matches(name, by_name, n=1, cutoff=0.6)]


def _line(key: str, details: ErrorDetails, layers: SettingLayers, model: type[BaseModel]) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key {key} in {setting_origin(key, layers)}; {_hint(key, details, model)}"
    if kind in _BOUNDS:
        sign, limit = _BOUNDS[kind]
        return error_line(key, f"must be {sign} {context[limit]:g}", details["input"], layers)
    if kind == "literal_error":
        return error_line(key, f"must be one of {context['expected']}", details["input"], layers)
    if kind == "string_pattern_mismatch":
        must = f"must match {context['pattern']}"
        return error_line(key, must, details["input"], layers)
    if kind == "missing" and "[" in key:
        return f"{key} is missing (in {setting_origin(key, layers)})"
    if kind == "missing":  # otherwise only lists of a fixed length have required entries
        return error_line(key, "must have more entries", details["input"], layers)
    wanted = _KINDS.get(kind.split("_")[0])
    if kind.endswith(("_type", "_parsing")) and wanted:
        if key not in setting_types(model) and len(details["loc"]) > len(key.split(".")):
            wanted = "a number, true or false, or text"
            wanted += (
                ", or a list of these"
                if "list" in str(setting_types(model).get(_table(key)))
                else ""
            )
        return error_line(key, f"must be {wanted}", details["input"], layers)
    return error_line(key, f"is refused: {details['msg']}", details["input"], layers)


def _hint(key: str, details: ErrorDetails, model: type[BaseModel]) -> str:
    """The replacement to suggest for an unknown key."""
    if key in REMOVED_SETTINGS:
        return "this setting was removed; delete it"
    known = _known(key, model)
    tables = sorted({name.split(".")[0] for name in known if "." in name})
    wanted = nearest_key(key, tables if isinstance(details["input"], dict) else known)
    if wanted:
        return f"nearest known: {wanted}"
    table = key.rpartition(".")[0]
    inside = [name.rpartition(".")[2] for name in known if name.startswith(f"{table}.")]
    return f"known there: {', '.join(inside if table else tables)}"


def _table(key: str) -> str:
    return key.rpartition(".")[0]


def _known(key: str, model: type[BaseModel]) -> list[str]:
    """The known keys in the place of this one: in a list of tables those of its items."""
    found = setting_types(model)
    name, bracket, _ = key.partition("[")
    if not bracket:
        return list(found)
    item = next(one for one in get_args(found[name]) if one is not Ellipsis)
    return [f"{_table(key)}.{field}" for field in setting_types(item)]


def _key(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """The dotted key of a pydantic location, up to the setting or to the name inside a table of
    options.
    """
    known = setting_types(model)
    for depth in range(1, len(location) + 1):
        key = ".".join(map(str, location[:depth]))
        if key in known:
            inside = location[depth : depth + 2]
            if len(inside) == 2 and isinstance(inside[0], int):  # a list of tables
                return f"{key}[{inside[0]}].{inside[1]}"
            option = location[depth] if len(location) > depth else None
            is_table = "dict" in str(known[key])
            return f"{key}.{option}" if is_table and isinstance(option, str) else key
    return ".".join(map(str, location))
