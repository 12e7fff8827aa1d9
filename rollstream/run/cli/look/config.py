"""`rollstream config [RUN] [KEY]`: each setting's value and where it is set; of a single one also
type, default, scope and meaning; with `--changes` its course, from the ledger.
docs/reference/settings.md is made from `setting_tables`.
"""

import argparse
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.look.monitor.format import plain_table
from rollstream.look.query.locate import locate_asked_run
from rollstream.look.query.looking import open_run_view
from rollstream.look.query.record_times import utc_time
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.config.config import (
    load_layers,
    setting_changes,
    setting_scope,
    validate_layers,
)
from rollstream.run.config.errors import FOREIGN_NAMES, nearest_key, printable_value, setting_origin
from rollstream.run.config.loss_table import without_loss_table
from rollstream.run.config.settings import Configuration
from rollstream.run.console import TerminalConsole
from rollstream.run.signals import warn
from rollstream.storage.settings import PROMPTED, Settings
from rollstream.storage.stored_settings import recorded_settings
from rollstream.streams.records import Configured, Prompt, Take
from rollstream.streams.values import SettingsSince

if TYPE_CHECKING:  # imports pyarrow
    from rollstream.storage.archive.log_view import LogView

LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
TYPE_NAMES: dict[Any, str] = {
    str: "text", int: "integer", float: "number", bool: "boolean", NoneType: "null",
    list: "list",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """`key` is the dotted name, `kind` the type as text, `limits` begins with a space or is empty,
    `default` is JSON or `required`, `change` is one of `CHANGES`.
    """

    key: str
    kind: str
    limits: str
    default: str
    change: str
    meaning: str


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """The settings table of one TOML table, without the tables inside it."""

    name: str
    meaning: str
    settings: tuple[SettingEntry, ...]


def setting_tables(
    name: str = "", model: type[Settings] = Configuration
) -> Iterator[SettingsTable]:
    """The table `name`, which `model` declares, and every table inside it, in the order of
    declaration; by default all settings of a run.
    """
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
    """Returns the type text in the terms of TOML and JSON; values are in backquotes."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(member)}`" for member in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_text(member) for member in arguments)
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
    return " ".join((text or "").split())


def _entries(key: str, field: FieldInfo) -> Iterator[SettingEntry]:
    """The setting `key`, and for a list of tables (`[[key]]`) also those of one item."""
    kinds = [kind for kind in get_args(field.annotation) if isinstance(kind, type)]
    item = next((kind for kind in kinds if issubclass(kind, Settings)), None)
    limits = [
        f"{sign} {getattr(constraint, name):g}"
        for name, sign in LIMITS.items()
        for constraint in field.metadata
        if getattr(constraint, name, None) is not None
    ]
    default: Any = None if field.is_required() else field.get_default(call_default_factory=True)
    yield SettingEntry(
        key,
        f"tables `[[{key}]]`" if item else type_text(field.annotation),
        f" {', '.join(limits)}" if limits else "",
        "required" if field.is_required() else json.dumps(default),
        setting_scope(key).value,
        plain_text(field.description),
    )
    for name, inner in item.model_fields.items() if item else ():
        yield from _entries(f"{key}.{name}", inner)


CHANGES = {
    "yes": "may change between two starts of a run",
    "accepted": "may change between two starts of a run with --accept-config",
    "group": "may change between two starts of a run with --accept-config, from a later group on",
    "take": "may change between two starts of a run with --accept-config, from the next take on",
    "no": "cannot change in a run",
}


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "trainer.lr", "examples/quickstart.toml trainer", "runs/quickstart-0 --changes"
    )
    command.add_run(
        "a run, or a TOML file; default: newest run, or the defaults if there is none",
        before=("key",),
        required=False,
    )
    help = "a setting, e.g. trainer.lr, or a table of settings, e.g. trainer; default: all"
    command.add_argument("key", metavar="KEY", nargs="?", help=help)
    help = (
        "print how settings changed in the course of the run: step, time, values before and after"
    )
    command.add_argument("--changes", action="store_true", help=help)
    command.add_overrides("explain the settings as if a command had this override")
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    entries = [entry for table in setting_tables() for entry in table.settings]
    chosen = chosen_entries(arguments.key, entries)
    if arguments.changes:
        keys = None if arguments.key is None else {entry.key for entry in chosen}
        _print_changes([*change_lines(arguments.run, keys)], arguments.json)
        return 0
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
        TerminalConsole().print(table)
    return 0


def change_lines(run: str | None, keys: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """Each change of a setting (of `keys`) between two starts of the trainer as a JSON object: the
    last step under the value `before`, and the time of the next start.
    """
    before: dict[str, Any] | None = None
    with open_run_view(locate_asked_run(run, None, warn)) as view:
        since = _groups_since(view)
        for received in view.topic("ledger", skip_damaged=True).records():
            if not isinstance(received.record, Configured):
                continue
            if view.store is None:
                raise ConfigurationError("the run has no store, where its settings would be")
            digest = received.record.configuration_hash
            try:
                now = recorded_settings(view.store, digest)
            except ObjectMissing as error:
                warn(
                    f"the settings from step {received.record.resumed_from} on are not kept: "
                    f"{error}"
                )
                continue
            for change in setting_changes(now if before is None else before, now):
                if keys is None or change.key in keys:
                    is_prompted = setting_scope(change.key) is PROMPTED
                    yield {
                        "step": received.record.resumed_from,
                        "group": since.get(digest) if is_prompted else None,
                        "time_s": received.time_s,
                        "setting": change.key,
                        "before": printable_value(change.key, change.before, json.dumps),
                        "after": printable_value(change.key, change.now, json.dumps),
                    }
            before = now


def _groups_since(view: "LogView") -> dict[str, int]:
    since: dict[str, int] = {}
    # Prompts name the settings of groups that are not trained yet.
    for topic in ("prompts", "ledger"):
        for received in view.topic(topic, skip_damaged=True).records():
            stated = (
                received.record.settings if isinstance(received.record, Prompt | Take) else None
            )
            for settings in (stated,) if isinstance(stated, SettingsSince) else stated or ():
                since[settings.configuration_hash] = settings.group
    return since


def _print_changes(lines: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for line in lines:
            print(json.dumps(line))
        return
    if not lines:
        print("no setting was changed")
        return
    table = plain_table("after step", "from group", "time (UTC)", "setting", "before", "after")
    for line in lines:
        when = utc_time(int(line["time_s"] * 1000))
        time = "" if when is None else when.strftime("%Y-%m-%d %H:%M:%S")
        group = "" if line["group"] is None else str(line["group"])
        table.add_row(
            str(line["step"]), group, time, line["setting"], line["before"], line["after"]
        )
    TerminalConsole().print(table)


def chosen_entries(key: str | None, entries: Sequence[SettingEntry]) -> list[SettingEntry]:
    """The setting `key`, else all of this table, else each with this last part (`lr`); all for
    None. Raises `ConfigurationError` with the nearest setting, or that of another framework's name
    (`FOREIGN_NAMES`).
    """
    if key is None:
        return [*entries]
    key = without_loss_table(key, "the command line")
    exact = [setting for setting in entries if setting.key == key]
    inside = [setting for setting in entries if setting.key.startswith(f"{key}.")]
    same_name = [setting for setting in entries if setting.key.rpartition(".")[2] == key]
    if chosen := exact or inside or same_name:
        return chosen
    name = key.rpartition(".")[2]
    if name in FOREIGN_NAMES:
        raise ConfigurationError(f"unknown setting {key}; here: {FOREIGN_NAMES[name]}")
    keys = [setting.key for setting in entries]
    tables = sorted({dotted.partition(".")[0] for dotted in keys if "." in dotted})
    nearest = nearest_key(key, keys) or f"one of the tables {', '.join(tables)}"
    raise ConfigurationError(f"unknown setting {key}; nearest known: {nearest}")


def setting_lines(
    run: str | None, overrides: Sequence[str], entries: Sequence[SettingEntry]
) -> list[dict[str, str]]:
    """Returns JSON objects; `set_in` names the file, variable or option, or `the defaults`. `run`
    is a run's folder or a configuration file.
    """
    path = None if run is None else Path(run)
    file = path / "config.json" if path and path.is_dir() else path
    layers = load_layers(file, overrides)
    configuration = validate_layers(layers)
    if file is not None:
        # Slow to import.
        from rollstream.run.cli.configuration import warn_of_unused

        warn_of_unused(file, layers, configuration)
    values = configuration.model_dump(mode="json")
    return [
        {
            "setting": setting.key,
            "value": _value_text(setting.key, values),
            "set_in": setting_origin(setting.key, layers),
            "type": f"{setting.kind}{setting.limits}".replace("`", ""),
            "default": setting.default,
            "change": CHANGES[setting.change],
            "meaning": setting.meaning,
        }
        for setting in entries
    ]


def _value_text(key: str, values: dict[str, Any]) -> str:
    """Returns JSON without secrets; – for a setting of each table in a list."""
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
