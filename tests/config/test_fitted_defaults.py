"""A default adapts, only a setting is refused: no single setting with a valid value contradicts a
default. The settings are those of the catalogue, so a new one is covered.
"""

from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollstream.errors import ConfigurationError
from rollstream.run.config.config import load_layers, setting_value, validate_layers
from rollstream.run.config.fitted_defaults import FOLLOW_DATA, put_recorded_defaults, set_settings
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import SettingLayers

MEANT = {
    "sampling.temperature=0.0": "training explores",
    "sampling.top_k": "the log does not record the kept set",
    "sampling.top_p": "the log does not record the kept set",
    "trainer.samples_per_group=1": "an advantage compares samples",
    "trainer.processes": "ranks share one model",
    "warmup.enabled=False": "there must be a model",
    "agent.service=True": "",
}
"""Settings that are refused for what they are, not for a default, and why."""


def fields(table: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in table.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, info


def values_of(info: FieldInfo) -> list[Any]:
    """Valid values of a setting, among them its bounds."""
    kinds = [info.annotation]
    if get_origin(info.annotation) in (Union, type(int | None)):
        kinds = [kind for kind in get_args(info.annotation) if kind is not type(None)]
    kind = kinds[0]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return [True, False]
    if kind not in (int, float):
        return []
    low: Any = next((m.ge for m in info.metadata if isinstance(m, Ge)), None)
    above: Any = next((m.gt for m in info.metadata if isinstance(m, Gt)), None)
    high: Any = next((m.le for m in info.metadata if isinstance(m, Le)), None)
    below: Any = next((m.lt for m in info.metadata if isinstance(m, Lt)), None)
    tried: list[Any] = [low, high, 1, 1000]
    if isinstance(info.default, int | float) and not isinstance(info.default, bool):
        tried += [info.default * 3, info.default // 3]
    fitting: list[Any] = []
    for value in tried:
        if value is None or (kind is int and value != int(value)):
            continue
        value = kind(value)
        if (low is not None and value < low) or (high is not None and value > high):
            continue
        if (above is not None and value <= above) or (below is not None and value >= below):
            continue
        fitting.append(value)
    return list(dict.fromkeys(fitting))


def layers_of(*pairs: tuple[str, Any]) -> SettingLayers:
    """The layers of a run file that has these settings alone."""
    return load_layers(None, [f"{key}={_text(value)}" for key, value in pairs], {})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


SINGLE = [(key, value) for key, info in fields(Configuration) for value in values_of(info)]


def is_meant(key: str, value: Any) -> bool:
    return key in MEANT or f"{key}={value}" in MEANT


def refusals(base: list[tuple[str, Any]], tables: tuple[str, ...] = ()) -> list[str]:
    """The refusals of each single setting, in these tables, beside the settings of `base`."""
    named = {key for key, _ in base}
    refused: list[str] = []
    for key, value in SINGLE:
        if is_meant(key, value) or key in named or (tables and not key.startswith(tables)):
            continue
        try:
            validate_layers(layers_of(*base, (key, value)))
        except ConfigurationError as error:
            refused.append(f"{key} = {value}: {error}")
    return refused


def test_no_single_setting_contradicts_a_default():
    assert refusals([]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    [
        [("rollouts.on_update", "keep_version")],
        [("trainer.preset", "ppo")],
        [("trainer.preset", "dapo")],
        [("agent.episode", "program:episode")],
    ],
    ids=str,
)
def test_no_setting_contradicts_a_default_of_another_kind_of_run(base: list[tuple[str, Any]]):
    assert refusals(base, ("dispatch.", "sampling.", "trainer.steps", "trainer.groups")) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rollouts.context_max": 100}, {"sampling.tokens_max": 80}),
        ({"sampling.tokens_max": 2000}, {"rollouts.context_max": 2092}),
        (
            {"model.config.max_position_embeddings": 64},
            {"rollouts.context_max": 64, "sampling.tokens_max": 51},
        ),
        ({"model.config.sliding_window": 96}, {"rollouts.context_max": 96}),
        (
            {"model.config.sliding_window": 96, "model.config.use_sliding_window": False},
            {"rollouts.context_max": 512},
        ),
        (
            {"model.config.sliding_window": 96, "sampling.tokens_max": 100},
            {"rollouts.context_max": 512},
        ),
        ({"rollouts.engine": "paced"}, {"trainer.learner": "paced", "evaluation.enabled": False}),
        ({"agent.episode": "a:b"}, {"evaluation.enabled": False}),
        ({"rollouts.status_s": 9.0}, {"dispatch.heartbeat_timeout_s": 36.0}),
        ({"dispatch.stuck_timeout_s": 5.0}, {"dispatch.heartbeat_timeout_s": 5.0}),
        ({"trainer.updates_per_step": 40}, {"trainer.groups_per_step": 40}),
        ({"trainer.survivors_min": 9}, {"trainer.samples_per_group": 9}),
        ({"trainer.ratio_min": 5.0}, {"trainer.ratio_max": 5.0}),
    ],
    ids=str,
)
def test_what_nobody_set_follows_what_was_set(given: dict[str, Any], expected: dict[str, Any]):
    layers = layers_of(*given.items())
    configuration = validate_layers(layers)
    assert {key: setting_value(configuration, key) for key in expected} == expected
    assert set_settings(layers) == given.keys()


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ([("rollouts.context_max", 100), ("sampling.tokens_max", 100)], "sampling.tokens_max"),
        (
            [("sampling.tokens_max", 80), ("model.config.max_position_embeddings", 64)],
            "sampling.tokens_max",
        ),
        ([("rollouts.engine", "paced"), ("evaluation.enabled", True)], "evaluation.enabled"),
        ([("rollouts.status_s", 9.0), ("dispatch.heartbeat_timeout_s", 10.0)], "heartbeat"),
        ([("trainer.survivors_min", 9), ("trainer.samples_per_group", 4)], "survivors_min"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(pairs: list[tuple[str, Any]], named: str):
    with pytest.raises(ConfigurationError, match=named):
        validate_layers(layers_of(*pairs))


def test_a_run_keeps_what_its_defaults_became():
    layers, recorded = layers_of(("sampling.tokens_max", 30)), SettingLayers()
    recorded.put("rollouts.context_max", 777, "config.json")
    recorded.put("sampling.tokens_max", 40, "config.json")
    put_recorded_defaults(layers, recorded)
    configuration = validate_layers(layers)
    assert (configuration.rollouts.context_max, configuration.sampling.tokens_max) == (777, 30)
    assert {"rollouts.context_max", "sampling.tokens_max"} <= set(FOLLOW_DATA)
