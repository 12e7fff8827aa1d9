"""Fits defaults to the settings that a user set, so that only settings that contradict each other
are refused. The rules read settings and the model's configuration alone: every host computes the
same.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from rollstream.consumers.credit import GAE
from rollstream.consumers.objective_settings import BEHAVIOUR
from rollstream.producers.engines.kind import ENGINES, engine_kind
from rollstream.run.config.policy_defaults import DEFAULTS, is_set, layer_count, layer_value
from rollstream.run.config.settings import Configuration, lacks_verifier, model_fields
from rollstream.run.config.sources import SettingLayers
from rollstream.storage.model_folder.hf_folder import longest_positions
from rollstream.storage.model_folder.lora_folder import (
    ADAPTER_KEYS,
    adapter_settings,
    settings_as_set,
)

# The share of a context that answers get where the default answer does not fit into it.
ANSWER_SHARE = 0.8
# Of `paced.lengths`.
LENGTH_MAX = 1e9
# Status intervals that a time-out must cover (`setting_problems`).
HEARTBEATS = 4
_DEFAULTS = Configuration()
_PROMPT_TOKENS = _DEFAULTS.rollouts.context_max - _DEFAULTS.sampling.tokens_max
# The origin of such a value begins so; the settings that it follows stand behind.
ORIGIN = f"{DEFAULTS} that fits"


def put_fitting_shapes(layers: SettingLayers) -> None:
    """Puts the fitting shapes of model and adapter, before policies and presets, which
    follow them.
    """
    _put(layers, (_adapter, _lengths))


def put_fitting_defaults(layers: SettingLayers) -> None:
    """Sets each unset setting whose default contradicts the layers. Values that validation will
    refuse fit nothing.
    """
    _put(layers, (_engine, _paced, _agent, _unverified, _dispatch, _steps, _versions))


def _put(layers: SettingLayers, rules: Iterable["Callable[[SettingLayers], _Fitted]"]) -> None:
    for rule in rules:
        for key, value, because in rule(layers):
            if not is_set(layers, key):
                layers.put(key, value, f"{ORIGIN} {because}")


# Settings whose defaults are fitted to the data at a run's start, and recorded by the run.
FOLLOW_DATA = (
    "rollouts.context_max",
    "sampling.tokens_max",
    "task.template",
    "evaluation.prompts",
    "evaluation.enabled",
)


def put_recorded_defaults(layers: SettingLayers, recorded: SettingLayers) -> list[str]:
    """Puts the recorded defaults of `FOLLOW_DATA`, from the run's `config.json`; returns a line for
    each change.
    """
    lines: list[str] = []
    for key in FOLLOW_DATA:
        if key not in recorded.origins or is_set(layers, key):
            continue
        before, value = layer_value(layers, key), layer_value(recorded, key)
        layers.put(key, value, f"{DEFAULTS} as the run recorded it")
        if value != before:
            lines.append(f"{key} = {json.dumps(value)}: nobody sets it, and the run has it so")
    return lines


def set_settings(layers: SettingLayers) -> frozenset[str]:
    return frozenset(key for key in layers.origins if is_set(layers, key))


# A setting, the value that fits, and the settings that it follows.
_Fitted = Iterator[tuple[str, Any, str]]


def longest_sequence(c: Configuration) -> int | None:
    """Returns tokens that model, engine, and cache of the engine 'paced' take; None without a known
    bound.
    """
    fields = model_fields(c.model.path, c.model.config)
    served = c.rollouts.kind.context_bound(fields)
    return _longest(longest_positions(fields), c.paced.kv_tokens, served)


def _longest(*bounds: object) -> int | None:
    numbers = [bound for bound in bounds if isinstance(bound, int) and bound > 1]
    return min(numbers, default=None)


def _adapter(layers: SettingLayers) -> _Fitted:
    path = layer_value(layers, "model.lora.path")
    is_recorded = all(is_set(layers, key) for key in ADAPTER_KEYS)
    if isinstance(path, str) and not is_recorded:
        for key, value in settings_as_set(adapter_settings(path)).items():
            yield key, value, f"model.lora.path = {path!r}"


def _lengths(layers: SettingLayers) -> _Fitted:
    path, config = layer_value(layers, "model.path"), layer_value(layers, "model.config")
    answer = layer_count(layers, "sampling.tokens_max")
    context = layer_count(layers, "rollouts.context_max")
    evaluated = layer_count(layers, "evaluation.tokens_max")
    positions = served = None
    if (path is None or isinstance(path, str)) and isinstance(config, dict):
        fields = model_fields(path, cast(dict[str, object], config))
        positions = longest_positions(fields)
        engine = layer_value(layers, "rollouts.engine")
        if isinstance(engine, str) and engine in ENGINES:
            served = engine_kind(engine).context_bound(fields)
        needed = max(evaluated, answer if is_set(layers, "sampling.tokens_max") else 0)
        if served is not None and served <= needed:
            # The set lengths do not fit: the engine's refusal gives the reason.
            served = None
    longest = _longest(positions, layer_value(layers, "paced.kv_tokens"), served)
    if not is_set(layers, "rollouts.context_max"):
        if is_set(layers, "sampling.tokens_max"):
            context = max(context, answer + _PROMPT_TOKENS)
        if evaluated >= context:
            context = evaluated + _PROMPT_TOKENS
        context = context if longest is None else min(context, longest)
        if context != _DEFAULTS.rollouts.context_max:
            is_served = context == served
            model = "the window that the engine serves" if is_served else "the model's positions"
            yield "rollouts.context_max", context, f"sampling.tokens_max and {model}"
    if answer >= context > 1:
        answer = max(1, int(ANSWER_SHARE * context))
        yield "sampling.tokens_max", answer, f"rollouts.context_max = {context}"


def _engine(layers: SettingLayers) -> _Fitted:
    engine, learner = layer_value(layers, "rollouts.engine"), layer_value(layers, "trainer.learner")
    if not isinstance(engine, str) or engine not in ENGINES:
        # The validation refuses it.
        return
    kind = engine_kind(engine)
    yield from kind.fitted_defaults(partial(layer_value, layers))
    if kind.has_model and learner != kind.learner:
        for other in map(engine_kind, ENGINES):
            if other.learner == learner:
                yield "rollouts.engine", other.name, f"trainer.learner = {learner!r}"
                yield "evaluation.enabled", False, f"trainer.learner = {learner!r}"


def _paced(layers: SettingLayers) -> _Fitted:
    lengths = _DEFAULTS.paced.lengths
    median = _number(layers, "paced.lengths.median")
    p99 = _number(layers, "paced.lengths.p99")
    if 0 < p99 < median:
        factor = lengths.p99 / lengths.median
        yield (
            "paced.lengths.p99",
            min(median * factor, LENGTH_MAX),
            f"paced.lengths.median = {median:g}",
        )
        yield "paced.lengths.median", max(1.0, p99 / factor), f"paced.lengths.p99 = {p99:g}"


def _agent(layers: SettingLayers) -> _Fitted:
    programs = ("agent.episode", "agent.command", "agent.service")
    if not any(layer_value(layers, key) for key in programs):
        return
    yield "evaluation.enabled", False, "[agent]: an evaluation asks for single answers"
    endpoint = layer_value(layers, "agent.endpoint")
    if isinstance(endpoint, str) and endpoint.rpartition(":")[2] != "0":
        yield "rollouts.count", 1, "agent.endpoint, which has one port"


def _unverified(layers: SettingLayers) -> _Fitted:
    if layer_value(layers, "task.reward") != "late" or not layer_value(layers, "scoring.function"):
        return
    parts: object = layer_value(layers, "task.parts")
    tables = list(cast(list[object], parts)) if isinstance(parts, list | tuple) else []
    tables.append(
        {key: layer_value(layers, f"task.{key}") for key in ("name", "options")},
    )
    for table in tables:
        if not isinstance(table, Mapping):
            continue
        fields = cast(Mapping[str, object], table)
        options = fields.get("options")
        if isinstance(options, Mapping) and lacks_verifier(
            fields.get("name"), cast(Mapping[str, object], options)
        ):
            # A scorer gives the rewards, and held-out answers have no judge.
            yield "evaluation.enabled", False, "task.options, which has no verifier"


def _dispatch(layers: SettingLayers) -> _Fitted:
    status = _number(layers, "rollouts.status_s")
    timeout = _number(layers, "dispatch.heartbeat_timeout_s")
    stuck = _number(layers, "dispatch.stuck_timeout_s")
    if is_set(layers, "dispatch.stuck_timeout_s"):
        timeout = min(timeout, stuck)
    if is_set(layers, "rollouts.status_s"):
        timeout = max(timeout, HEARTBEATS * status)
    if timeout != _number(layers, "dispatch.heartbeat_timeout_s"):
        yield "dispatch.heartbeat_timeout_s", timeout, "rollouts.status_s and stuck_timeout_s"
    timeout = _number(layers, "dispatch.heartbeat_timeout_s", timeout)
    if stuck < timeout:
        yield "dispatch.stuck_timeout_s", timeout, f"dispatch.heartbeat_timeout_s = {timeout:g}"
    if HEARTBEATS * status > timeout:
        yield "rollouts.status_s", timeout / HEARTBEATS, f"heartbeat_timeout_s = {timeout:g}"
    wave = layer_count(layers, "trainer.groups_per_step")
    if wave > layer_count(layers, "dispatch.ready_groups_max"):
        yield "dispatch.ready_groups_max", wave, f"trainer.groups_per_step = {wave}"
        if layer_value(layers, "dispatch.max_lag") is None:
            ready = layer_count(layers, "dispatch.ready_groups_max")
            yield "trainer.groups_per_step", ready, f"dispatch.ready_groups_max = {ready}"


def _steps(layers: SettingLayers) -> _Fitted:
    updates, groups = "trainer.updates_per_step", "trainer.groups_per_step"
    if layer_count(layers, updates) > layer_count(layers, groups):
        yield groups, layer_count(layers, updates), f"{updates} = {layer_count(layers, updates)}"
    survivors, samples = "trainer.survivors_min", "trainer.samples_per_group"
    if layer_count(layers, survivors) > layer_count(layers, samples):
        yield survivors, layer_count(layers, samples), f"{samples} = {layer_count(layers, samples)}"
        yield (
            samples,
            layer_count(layers, survivors),
            f"{survivors} = {layer_count(layers, survivors)}",
        )
    low, high = _number(layers, "trainer.ratio_min"), _number(layers, "trainer.ratio_max")
    if low > high > 0:
        yield "trainer.ratio_max", low, f"trainer.ratio_min = {low:g}"
    steps = layer_count(layers, "trainer.steps")
    warmup = layer_count(layers, "trainer.critic.warmup")
    if layer_value(layers, "trainer.advantage") == GAE and warmup >= steps > 0:
        yield "trainer.critic.warmup", steps - 1, f"trainer.steps = {steps}"


def _versions(layers: SettingLayers) -> _Fitted:
    reads_old = layer_value(layers, "trainer.proximal") == BEHAVIOUR
    lag = layer_value(layers, "dispatch.max_lag")
    default = _DEFAULTS.dispatch.max_lag
    # Such a loss reads older versions, which must be kept.
    if reads_old and lag is None:
        yield "dispatch.max_lag", default, f"trainer.proximal = {BEHAVIOUR!r}"
        lag = default if not is_set(layers, "dispatch.max_lag") else lag
    if not reads_old or not isinstance(lag, int):
        return
    every = layer_count(layers, "checkpoints.every")
    checkpoint_steps = every * (layer_count(layers, "checkpoints.keep") + 1)
    if layer_count(layers, "weights.versions_max") < checkpoint_steps + lag + 1:
        yield "weights.versions_max", checkpoint_steps + lag + 1, "trainer.proximal and checkpoints"


def _number(layers: SettingLayers, key: str, other: float | None = None) -> float:
    """A positive number, or `other` if no layer sets the setting; 0 for another value."""
    if other is not None and not is_set(layers, key):
        return other
    value = layer_value(layers, key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) if is_number else 0.0
