"""The table `[trainer.loss]` of a file: `kind = "ppo_clip"` and `clip_low = 0.1` there are
`trainer.loss` and `trainer.clip_low` everywhere else.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from rollstream.consumers.objective_settings import loss_requirement
from rollstream.consumers.objectives.losses.kinds import loss_kinds
from rollstream.consumers.settings import TrainerSettings
from rollstream.errors import ConfigurationError

TABLE, KIND = "trainer.loss", "kind"


def take_loss_table(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Removes the table from a file's `values` and returns its settings by their other keys. Raises
    `ConfigurationError` with a line for each setting that does not belong there.
    """
    trainer = values.get("trainer")
    if not isinstance(trainer, dict) or not isinstance(trainer.get("loss"), dict):  # pyright: ignore[reportUnknownMemberType]
        return {}
    beside = cast(dict[str, Any], trainer)
    table: dict[str, Any] = beside.pop("loss")
    kind = table.pop(KIND, None)
    problems = [*_kind_problems(kind, table)] or [*_key_problems(kind, table)]
    problems += [
        f"trainer.{key} and {TABLE}.{key} are one setting: delete one of them"
        for key in table
        if key in beside
    ]
    if problems:
        raise ConfigurationError("\n".join(f"{file}: {problem}" for problem in problems))
    return {TABLE: kind} | {f"trainer.{key}": value for key, value in table.items()}


def without_loss_table(key: str, origin: str) -> str:
    """A dotted key with `trainer.loss.clip_low` as `trainer.clip_low`. Raises `ConfigurationError`
    for a setting that belongs to no loss.
    """
    if not key.startswith(f"{TABLE}."):
        return key
    name = key.removeprefix(f"{TABLE}.")
    if name == KIND:
        return TABLE
    if _is_shared(name):
        raise ConfigurationError(
            f"{key} in {origin}: {name} belongs to no loss; set trainer.{name}"
        )
    return f"trainer.{name}"


def twice_set_hint(error: Exception, data: bytes) -> str:
    """Returns a hint about a TOML file that holds the loss as text and as a table; "" for another
    error.
    """
    forms = (rb"^\s*\[trainer\.loss\]", rb"^\s*loss\s*=")
    if "overwrite" in str(error) and all(re.search(form, data, re.MULTILINE) for form in forms):
        return f"; {TABLE} is there as text and as a table: keep one of both"
    return ""


def _kind_problems(kind: object, table: Mapping[str, Any]) -> Iterator[str]:
    if kind is None:
        able = [name for name, loss in loss_kinds().items() if table.keys() <= loss.keys]
        names = " or ".join(f'{KIND} = "{name}"' for name in able or loss_kinds())
        yield f"{TABLE} is a table and lacks its {KIND}: add {names}, or an own 'module:function'"
    elif not isinstance(kind, str):
        yield f"{TABLE}.{KIND} must be text, got {kind!r}"
    elif must := loss_requirement(kind):
        yield f"{TABLE}.{KIND} {must}, got {kind!r}"


def _key_problems(kind: str, table: Mapping[str, Any]) -> Iterator[str]:
    # An own loss may read the settings of any other. Unknown names are refused with all others.
    chosen = loss_kinds().get(kind)
    for key in table:
        owners = [name for name, loss in loss_kinds().items() if key in loss.keys]
        if _is_shared(key):
            yield f"{TABLE}.{key}: {key} belongs to no loss; move it to [trainer]"
        elif chosen is not None and owners and kind not in owners:
            has = ", ".join(sorted(chosen.keys)) or "no setting"
            yield (
                f'{TABLE}.{key} belongs to {KIND} = "{owners[0]}", and {KIND} = "{kind}" has '
                f"{has}: delete it, or move it to [trainer] if another part reads it"
            )


def _is_shared(key: str) -> bool:
    is_own = any(key in loss.keys for loss in loss_kinds().values())
    return key.partition(".")[0] in TrainerSettings.model_fields and not is_own
