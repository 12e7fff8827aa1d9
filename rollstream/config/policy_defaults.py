"""Chooses the defaults of settings whose best value depends on `rollouts.on_update`
(docs/explanation/scheduling.md, Defaults by policy) or that `trainer.preset` gives
(docs/explanation/learning.md, Presets), for a configuration that does not set them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from rollstream.config.settings import Configuration
from rollstream.config.sources import SettingLayers
from rollstream.consumers.objective_settings import OBJECTIVE_PRESETS

WAVES_READY = 4
"""Steps' worth of groups that may be admitted and not taken by the trainer. With the step in
training that is as much work as `max_lag` = 4 allows, whose lag it keeps but for long answers.
"""

OVERLONG_SHARE = 5
"""DAPO punishes the last 4 096 of 20 480 tokens (arXiv 2503.14476, section 4.1): a fifth."""


def put_policy_defaults(layers: SettingLayers) -> None:
    """Set the settings below that no layer sets; their origin names `rollouts.on_update`. Values
    that validation will refuse give no defaults.

    Under `keep_version` an answer has one version, so one that lasts more than `max_lag` steps is
    dropped whole, and its group with it: there `max_lag` is null, and `ready_groups_max` bounds the
    outstanding work. Under the other policies old tokens are masked one by one, and the bound
    stays. A rollout draws at most its share of a step under an old version, because each answer
    more is one version older. With adapters nothing drains, so nothing is repacked.
    """
    mode = _value(layers, "rollouts.on_update")
    for key, value in _defaults(layers, mode):
        _put_unset(layers, key, value, f"the defaults of rollouts.on_update = {mode}")


def put_preset_defaults(layers: SettingLayers) -> None:
    """Set the settings that `trainer.preset` gives and no layer sets; their origin names it. An
    unknown preset gives none: validation refuses it.
    """
    preset = _value(layers, "trainer.preset")
    given: dict[str, object] = {}
    if isinstance(preset, str):
        given.update(OBJECTIVE_PRESETS.get(preset, {}))
    longest = _count(layers, "sampling.tokens_max")
    if preset == "dr_grpo" and longest:
        given["aggregate_tokens"] = longest
    if preset == "dapo" and longest >= OVERLONG_SHARE:
        given["overlong_penalty"] = [longest - longest // OVERLONG_SHARE, longest]
    for name, value in given.items():
        _put_unset(layers, f"trainer.{name}", value, f"trainer.preset = {preset}")


def _put_unset(layers: SettingLayers, key: str, value: Any, origin: str) -> None:
    """Set the setting if no layer sets it."""
    if key not in layers.origins:
        layers.put(key, value, origin)


def _defaults(layers: SettingLayers, mode: Any) -> Iterator[tuple[str, Any]]:
    """Yields settings and their defaults under this policy; a later one may depend on an earlier,
    which is in `layers` by then.
    """
    if mode != "keep_version":
        return
    drains = not _count(layers, "model.lora.rank")
    yield "dispatch.repack", drains
    yield "dispatch.max_lag", None
    wave = _count(layers, "trainer.groups_per_step")
    samples = _count(layers, "trainer.samples_per_group")
    samples += _count(layers, "task.redundancy") if samples else 0
    rollouts, slots = _count(layers, "rollouts.count"), _count(layers, "rollouts.slots")
    if wave and _value(layers, "dispatch.max_lag") is None:
        yield "dispatch.ready_groups_max", WAVES_READY * wave
    if drains and wave and samples and rollouts and slots:
        yield "rollouts.quota", min(2 * slots, -(-wave * samples // rollouts))


def _value(layers: SettingLayers, key: str) -> Any:
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


def _count(layers: SettingLayers, key: str) -> int:
    """Returns a setting that counts something; 0 if its value is no count."""
    value = _value(layers, key)
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else 0
