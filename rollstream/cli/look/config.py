"""`rollstream config [RUN] [KEY]`: explains settings, and where each has its value from."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from rollstream.cli.arguments import CommandParser
from rollstream.cli.look.listing import plain_table
from rollstream.cli.signals import quiet_on_closed_pipe
from rollstream.config.catalogue import SettingEntry, setting_tables
from rollstream.config.config import load_layers, validate_layers
from rollstream.config.errors import FOREIGN_NAMES, nearest_key, printable_value, setting_origin
from rollstream.errors import ConfigurationError

CHANGES = {
    "yes": "may change between two starts of a run",
    "accepted": "may change between two starts of a run with --accept-config",
    "no": "cannot change in a run",
}


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "trainer.lr", "examples/quickstart.toml trainer", "runs/quickstart-0 --json"
    )
    command.add_run(
        "a run, or a TOML file; default: newest run, or the defaults if there is none",
        before=("key",),
        required=False,
    )
    help = "a setting, e.g. trainer.lr, or a table of settings, e.g. trainer; default: all"
    command.add_argument("key", metavar="KEY", nargs="?", help=help)
    command.add_overrides("explain the settings as if a command had this override")
    command.add_json()


@quiet_on_closed_pipe
def main(arguments: argparse.Namespace) -> int:
    """Print one setting in full, or a line for each."""
    entries = [entry for table in setting_tables() for entry in table.settings]
    chosen = chosen_entries(arguments.key, entries)
    lines = setting_lines(arguments.run, arguments.overrides, chosen)
    if arguments.json:
        for line in lines:
            print(json.dumps(line))
    elif len(lines) == 1:
        _print_setting(lines[0])
    else:
        table = plain_table("setting", "value", "set in")
        for line in lines:
            table.add_row(line["setting"], line["value"], line["set_in"])
        Console().print(table)
    return 0


def chosen_entries(key: str | None, entries: Sequence[SettingEntry]) -> list[SettingEntry]:
    """Returns the setting of this name, with or without its table, or the settings of a table.
    Raises `ConfigurationError`, naming the nearest, if there is none.
    """
    if key is None:
        return [*entries]
    exact = [one for one in entries if one.key == key]
    inside = [one for one in entries if one.key.startswith(f"{key}.")]
    named = [one for one in entries if one.key.rpartition(".")[2] == key]
    if found := exact or inside or named:
        return found
    name = key.rpartition(".")[2]
    if name in FOREIGN_NAMES:
        raise ConfigurationError(f"unknown setting {key}; here: {FOREIGN_NAMES[name]}")
    known = [one.key for one in entries]
    tables = sorted({one.partition(".")[0] for one in known if "." in one})
    nearest = nearest_key(key, known) or f"one of the tables {', '.join(tables)}"
    raise ConfigurationError(f"unknown setting {key}; nearest known: {nearest}")


def setting_lines(
    run: str | None, overrides: Sequence[str], entries: Sequence[SettingEntry]
) -> list[dict[str, str]]:
    """Returns each setting as a JSON object; `set_in` names the file, the variable or the option
    that sets its value.
    """
    path = None if run is None else Path(run)
    layers = load_layers(path / "config.json" if path and path.is_dir() else path, overrides)
    values = validate_layers(layers).model_dump(mode="json")
    return [
        {
            "setting": one.key,
            "value": _value_text(one.key, values),
            "set_in": setting_origin(one.key, layers),
            "type": f"{one.kind}{one.limits}".replace("`", ""),
            "default": one.default,
            "change": CHANGES[one.change],
            "meaning": one.meaning,
        }
        for one in entries
    ]


def _value_text(key: str, values: dict[str, Any]) -> str:
    """The value as JSON, without secrets; – for a setting in a list of tables, which has many."""
    value: Any = values
    for part in key.split("."):
        if not isinstance(value, dict):
            return "–"
        value = cast(dict[str, Any], value)[part]
    return printable_value(key, value, json.dumps)


def _print_setting(line: dict[str, str]) -> None:
    print(f"{line['setting']} = {line['value']}  (set in {line['set_in']})")
    print(f"  {line['meaning']}")
    print(f"  type: {line['type']}; default: {line['default']}")
    print(f"  {line['change']}")
