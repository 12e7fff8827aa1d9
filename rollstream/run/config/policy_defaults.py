"""Defaults that depend on `rollouts.on_update` (docs/explanation/scheduling.md, Defaults by
policy), and the settings that `trainer.preset` decides (docs/explanation/learning.md, Presets).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from rollstream.consumers.objective_settings import OBJECTIVE_PRESETS
from rollstream.run.config.errors import printable_value
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import SettingLayers

# Steps' worth of groups that may be admitted and not taken. With the step in training that is the
# work and, but for long answers, the lag of `max_lag` = 4.
WAVES_READY = 4

# DAPO punishes the last 4 096 of 20 480 tokens (arXiv 2503.14476, section 4.1): a fifth.
OVERLONG_SHARE = 5

# In docs/explanation/evidence.md it was the best of those tried, with and without old tokens.
DEFAULT_PRESET = "topr"
# The settings that any preset gives: one that gives a setting no value means its default.
DECIDED_BY_PRESETS = frozenset(
    f"trainer.{name}"
    for names in (*OBJECTIVE_PRESETS.values(), ("aggregate_tokens", "overlong_penalty"))
    for name in names
)


# Origins of values that no source set begin so: a policy's, and a preset's.
DEFAULTS, PRESET = "the default", "trainer.preset = "


def is_set(layers: SettingLayers, key: str) -> bool:
    """Whether it is set by a source; a default of a policy or preset does not count."""
    return key in layers.origins and not layers.origins[key].startswith((DEFAULTS, PRESET))


def put_policy_defaults(layers: SettingLayers) -> None:
    """Sets those that follow `rollouts.on_update`, which their origin names. Values that validation
    will refuse give no defaults.
    """
    mode = layer_value(layers, "rollouts.on_update")
    for key, value in _defaults(layers, mode):
        put_unset(layers, key, value, f"the defaults of rollouts.on_update = {mode}")


def put_preset(layers: SettingLayers, ranks: Mapping[str, int]) -> Sequence[str]:
    """Sets the values of `trainer.preset`, whose name is their origin; `DEFAULT_PRESET` if the
    layers set nothing of `DECIDED_BY_PRESETS`. `ranks` has the rank of each key's source: the
    preset replaces all of `DECIDED_BY_PRESETS` from lower ranks, by the default where it has no
    value; others stay. Returns a line about the replaced values, and one about those that stay.
    """
    if not layers.origins.keys() & {"trainer", "trainer.preset", *DECIDED_BY_PRESETS}:
        layers.put("trainer.preset", DEFAULT_PRESET, "the default preset")
    preset = layer_value(layers, "trainer.preset")
    # Validation refuses an unknown preset.
    if not isinstance(preset, str) or preset not in OBJECTIVE_PRESETS:
        return ()
    preset_values = _given_by(preset, layers)
    name, source = f"{PRESET}{preset}", layers.origins["trainer.preset"]
    rank, defaults = ranks.get("trainer.preset", 0), Configuration().trainer
    replaced: list[str] = []
    conflicts: list[str] = []
    for key in sorted(DECIDED_BY_PRESETS & layers.origins.keys()):
        before, origin = layer_value(layers, key), layers.origins[key]
        preset_value = preset_values.get(key, getattr(defaults, key.removeprefix("trainer.")))
        shown, other = (
            printable_value(key, setting, json.dumps) for setting in (before, preset_value)
        )
        if ranks[key] < rank:
            layers.put(key, preset_value, name)
            replaced += (
                [f"{key} = {other} (in {origin}: {shown})"] if before != preset_value else []
            )
        elif key in preset_values and before != preset_value:
            conflicts.append(f"{key} = {shown} (in {origin}; the preset: {other})")
    for key, value in preset_values.items():
        put_unset(layers, key, value, name)
    lines = (
        (f"{name} in {source} decides", replaced),
        (f"kept against {name} in {source}", conflicts),
    )
    return [f"{what}: {', '.join(texts)}" for what, texts in lines if texts]


def _given_by(preset: str, layers: SettingLayers) -> Mapping[str, object]:
    values = {f"trainer.{name}": value for name, value in OBJECTIVE_PRESETS.get(preset, {}).items()}
    return values | given_by_length(preset, layer_count(layers, "sampling.tokens_max"))


def given_by_length(preset: str, longest: int) -> dict[str, object]:
    if preset == "dr_grpo" and longest:
        return {"trainer.aggregate_tokens": longest}
    if preset == "dapo" and longest >= OVERLONG_SHARE:
        return {"trainer.overlong_penalty": [longest - longest // OVERLONG_SHARE, longest]}
    return {}


def follow_length(layers: SettingLayers) -> None:
    preset = layer_value(layers, "trainer.preset")
    longest = layer_count(layers, "sampling.tokens_max")
    for key, value in given_by_length(preset, longest).items():
        if not is_set(layers, key):
            layers.put(key, value, f"{PRESET}{preset}")


def put_unset(layers: SettingLayers, key: str, value: Any, origin: str) -> None:
    if key not in layers.origins:
        layers.put(key, value, origin)


def _defaults(layers: SettingLayers, mode: Any) -> Iterator[tuple[str, Any]]:
    if mode != "keep_version":
        return
    # With adapters nothing drains, so nothing is repacked.
    drains = not layer_count(layers, "model.lora.rank")
    yield "dispatch.repack", drains
    # An answer has one version here: one that lasts more than `max_lag` steps would be dropped with
    # its group, so `ready_groups_max` bounds the work. Other policies mask old tokens alone.
    yield "dispatch.max_lag", None
    wave = layer_count(layers, "trainer.groups_per_step")
    samples = layer_count(layers, "trainer.samples_per_group")
    samples += layer_count(layers, "task.redundancy") if samples else 0
    rollouts, slots = layer_count(layers, "rollouts.count"), layer_count(layers, "rollouts.slots")
    if wave and layer_value(layers, "dispatch.max_lag") is None:
        yield "dispatch.ready_groups_max", WAVES_READY * wave
    if drains and wave and samples and rollouts and slots:
        # A share of a step: each answer more under an old version is one version older.
        yield "rollouts.quota", min(2 * slots, -(-wave * samples // rollouts))


def layer_value(layers: SettingLayers, key: str) -> Any:
    """Returns the setting's value in these layers, else its default."""
    at: Any = layers.values
    for part in key.split("."):
        if not isinstance(at, Mapping) or part not in at:
            at = Configuration()
            for name in key.split("."):
                at = getattr(at, name)
            return at
        at = cast(Mapping[str, Any], at)[part]
    return at


def layer_count(layers: SettingLayers, key: str) -> int:
    """Returns 0 if the value is no count."""
    value = layer_value(layers, key)
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else 0
