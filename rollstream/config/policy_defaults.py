"""Chooses the defaults of settings whose best value depends on `rollouts.on_update`
(docs/explanation/scheduling.md, Defaults by policy), for a configuration that does not set them,
and the settings that `trainer.preset` decides (docs/explanation/learning.md, Presets).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from rollstream.config.errors import printable_value
from rollstream.config.settings import Configuration
from rollstream.config.sources import SettingLayers
from rollstream.consumers.objective_settings import OBJECTIVE_PRESETS

WAVES_READY = 4
"""Steps' worth of groups that may be admitted and not taken by the trainer. With the step in
training that is as much work as `max_lag` = 4 allows, whose lag it keeps but for long answers.
"""

OVERLONG_SHARE = 5
"""DAPO punishes the last 4 096 of 20 480 tokens (arXiv 2503.14476, section 4.1): a fifth."""

DEFAULT_PRESET = "topr"
"""The objective of a configuration that sets nothing of it. In docs/explanation/evidence.md it was
the best of those tried, with and without old tokens.
"""
DECIDED_BY_PRESETS = frozenset(
    f"trainer.{name}"
    for names in (*OBJECTIVE_PRESETS.values(), ("aggregate_tokens", "overlong_penalty"))
    for name in names
)
"""The settings that any preset gives: one that gives a setting no value means its default."""


DEFAULTS, PRESET = "the default", "trainer.preset = "
"""How the origins of values begin that no source set: those of a policy, and those of a preset."""


def is_set(layers: SettingLayers, key: str) -> bool:
    """Returns whether a source set this setting; a default of a policy or preset does not count."""
    return key in layers.origins and not layers.origins[key].startswith((DEFAULTS, PRESET))


def put_policy_defaults(layers: SettingLayers) -> None:
    """Set the settings below that no layer sets; their origin names `rollouts.on_update`. Values
    that validation will refuse give no defaults.

    Under `keep_version` an answer has one version, so one that lasts more than `max_lag` steps is
    dropped whole, and its group with it: there `max_lag` is null, and `ready_groups_max` bounds the
    outstanding work. Under the other policies old tokens are masked one by one, and the bound
    stays. A rollout draws at most its share of a step under an old version, because each answer
    more is one version older. With adapters nothing drains, so nothing is repacked.
    """
    mode = layer_value(layers, "rollouts.on_update")
    for key, value in _defaults(layers, mode):
        put_unset(layers, key, value, f"the defaults of rollouts.on_update = {mode}")


def put_preset(layers: SettingLayers, ranks: Mapping[str, int]) -> Sequence[str]:
    """Set what `trainer.preset` decides; the origin of these settings names it. The preset is
    `DEFAULT_PRESET` where no source sets it or a setting of `DECIDED_BY_PRESETS` (or `trainer`
    itself, which is no table then). `ranks` has the
    rank of the source that set each key. A preset replaces all settings of `DECIDED_BY_PRESETS`
    that sources of a lower rank set, those that it gives no value by their default; what its own
    source or a higher one sets stays. An unknown preset decides nothing: validation refuses it.

    Returns a line about the values that the preset replaced, and one about those that stay against
    it, each with the value's source; none where no value differs.
    """
    if not layers.origins.keys() & {"trainer", "trainer.preset", *DECIDED_BY_PRESETS}:
        layers.put("trainer.preset", DEFAULT_PRESET, "the default preset")
    preset = layer_value(layers, "trainer.preset")
    if not isinstance(preset, str) or preset not in OBJECTIVE_PRESETS:
        return ()
    given = _given_by(preset, layers)
    name, source = f"{PRESET}{preset}", layers.origins["trainer.preset"]
    rank, defaults = ranks.get("trainer.preset", 0), Configuration().trainer
    replaced: list[str] = []
    kept: list[str] = []
    for key in sorted(DECIDED_BY_PRESETS & layers.origins.keys()):
        before, origin = layer_value(layers, key), layers.origins[key]
        wanted = given.get(key, getattr(defaults, key.removeprefix("trainer.")))
        shown, other = (printable_value(key, one, json.dumps) for one in (before, wanted))
        if ranks[key] < rank:
            layers.put(key, wanted, name)
            replaced += [f"{key} = {other} (in {origin}: {shown})"] if before != wanted else []
        elif key in given and before != wanted:
            kept.append(f"{key} = {shown} (in {origin}; the preset: {other})")
    for key, value in given.items():
        put_unset(layers, key, value, name)
    lines = ((f"{name} in {source} decides", replaced), (f"kept against {name} in {source}", kept))
    return [f"{what}: {', '.join(found)}" for what, found in lines if found]


def _given_by(preset: str, layers: SettingLayers) -> Mapping[str, object]:
    """Returns the settings that the preset gives a value, by their dotted keys."""
    given = {f"trainer.{name}": value for name, value in OBJECTIVE_PRESETS.get(preset, {}).items()}
    return given | given_by_length(preset, layer_count(layers, "sampling.tokens_max"))


def given_by_length(preset: str, longest: int) -> dict[str, object]:
    """Returns the settings whose values follow the longest answer under this preset."""
    if preset == "dr_grpo" and longest:
        return {"trainer.aggregate_tokens": longest}
    if preset == "dapo" and longest >= OVERLONG_SHARE:
        return {"trainer.overlong_penalty": [longest - longest // OVERLONG_SHARE, longest]}
    return {}


def follow_length(layers: SettingLayers) -> None:
    """Give settings of the preset the values that follow the present longest answer."""
    preset = layer_value(layers, "trainer.preset")
    longest = layer_count(layers, "sampling.tokens_max")
    for key, value in given_by_length(preset, longest).items():
        if not is_set(layers, key):
            layers.put(key, value, f"{PRESET}{preset}")


def put_unset(layers: SettingLayers, key: str, value: Any, origin: str) -> None:
    """Set the setting if no layer sets it."""
    if key not in layers.origins:
        layers.put(key, value, origin)


def _defaults(layers: SettingLayers, mode: Any) -> Iterator[tuple[str, Any]]:
    """Yields settings and their defaults under this policy; a later one may depend on an earlier,
    which is in `layers` by then.
    """
    if mode != "keep_version":
        return
    drains = not layer_count(layers, "model.lora.rank")
    yield "dispatch.repack", drains
    yield "dispatch.max_lag", None
    wave = layer_count(layers, "trainer.groups_per_step")
    samples = layer_count(layers, "trainer.samples_per_group")
    samples += layer_count(layers, "task.redundancy") if samples else 0
    rollouts, slots = layer_count(layers, "rollouts.count"), layer_count(layers, "rollouts.slots")
    if wave and layer_value(layers, "dispatch.max_lag") is None:
        yield "dispatch.ready_groups_max", WAVES_READY * wave
    if drains and wave and samples and rollouts and slots:
        yield "rollouts.quota", min(2 * slots, -(-wave * samples // rollouts))


def layer_value(layers: SettingLayers, key: str) -> Any:
    """Returns the value of a setting in these layers, else its default."""
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
    """Returns a setting that counts something; 0 if its value is no count."""
    value = layer_value(layers, key)
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else 0
