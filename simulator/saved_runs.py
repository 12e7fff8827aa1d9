"""Writes simulated runs to a file and reads them back, value for value."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from rollstream.errors import ConfigurationError
from rollstream.foreign_json import parse_loose_json
from rollstream.simulator.experiment import PolicyRun
from rollstream.whole_file import whole_file

KIND = "rollstream-simulation/1"

_RUNS = TypeAdapter(tuple[PolicyRun, ...])


def save_runs(runs: Sequence[PolicyRun], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {"kind": KIND, "runs": _RUNS.dump_python(tuple(runs), mode="json")}
    with whole_file(path) as partial:
        partial.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")


def load_saved_runs(path: Path) -> tuple[PolicyRun, ...]:
    """Raises `ConfigurationError` if the file is damaged or of another kind."""
    try:
        value: Any = parse_loose_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    saved = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if saved.get("kind") != KIND:
        raise ConfigurationError(
            f"{path} holds no simulated runs of this release ({KIND}); write it again with "
            "rollstream simulate CONFIG --save DIR"
        )
    try:
        return _RUNS.validate_python(saved.get("runs"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{path} is damaged: {where}: {first['msg']}") from None
