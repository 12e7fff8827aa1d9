"""Configuration errors as one line each: setting, requirement, value, and origin; for an unknown
key with its nearest known one, or Rollstream's name for another system's setting. No line shows a
secret: credentials in URLs, or values whose key, at any depth, names a password, token or the like.
"""

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollstream.run.config.sources import (
    ENVIRONMENT_ORIGIN,
    ENVIRONMENT_PREFIX,
    REMOVED_SETTINGS,
    SettingLayers,
    setting_types,
)

# Of a value in a line; the rest is cut off.
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

ROLLOUTS_OF_A_STEP = "trainer.groups_per_step × trainer.samples_per_group"
# Setting names of TRL, verl and prime-rl → Rollstream's (docs/how-to/migrate.md).
FOREIGN_NAMES = {
    "adv_estimator": "trainer.advantage", "advantage_estimator": "trainer.advantage",
    "batch_size": ROLLOUTS_OF_A_STEP, "train_batch_size": "trainer.groups_per_step",
    "beta": "trainer.reference_kl", "kl_coef": "trainer.reference_kl",
    "kl_loss_coef": "trainer.reference_kl", "kl_loss_type": "trainer.reference_kl_form",
    "clip_grad": "trainer.gradient_norm_max", "grad_clip": "trainer.gradient_norm_max",
    "max_grad_norm": "trainer.gradient_norm_max", "max_norm": "trainer.gradient_norm_max",
    "clip_ratio_low": "trainer.clip_low", "epsilon": "trainer.clip_low",
    "clip_ratio_high": "trainer.clip_high", "epsilon_high": "trainer.clip_high",
    "eval_steps": "evaluation.every", "test_freq": "evaluation.every",
    "generation_batch_size": ROLLOUTS_OF_A_STEP,
    "gpu_memory_utilization": "rollouts.vllm.memory_share",
    "group_size": "trainer.samples_per_group", "num_generations": "trainer.samples_per_group",
    "rollouts_per_example": "trainer.samples_per_group", "n": "trainer.samples_per_group",
    "learning_rate": "trainer.lr", "loss_type": "trainer.loss and trainer.aggregate",
    "max_async_level": "dispatch.max_lag", "max_off_policy_steps": "dispatch.max_lag",
    "staleness_threshold": "dispatch.max_lag",
    "max_completion_length": "sampling.tokens_max", "max_response_length": "sampling.tokens_max",
    "max_new_tokens": "sampling.tokens_max", "max_tokens": "sampling.tokens_max",
    "max_model_len": "rollouts.context_max", "seq_len": "rollouts.context_max",
    "max_prompt_length": "rollouts.context_max − sampling.tokens_max",
    "max_steps": "trainer.steps", "total_training_steps": "trainer.steps",
    "model_name_or_path": "model.path", "output_dir": "folder", "reward_funcs": "task.reward",
    "optim": "trainer.optimiser", "optimizer": "trainer.optimiser",
    "optimizer_offload": "trainer.cpu_offload",
    "num_iterations": "trainer.epochs", "ppo_epochs": "trainer.epochs",
    "cliprange_value": "trainer.critic.clip", "critic_warmup": "trainer.critic.warmup",
    "lam": "trainer.critic.gae_lambda", "vf_coef": "trainer.critic.loss_weight",
    "save_freq": "checkpoints.every", "save_steps": "checkpoints.every",
    "save_total_limit": "checkpoints.keep", "scale_rewards": "trainer.advantage",
    "tensor_parallel_size": "rollouts.vllm.tensor_parallel", "train_files": "task.options.path",
    "use_vllm": "rollouts.engine", "warmup_steps": "trainer.lr_ramp_steps",
}  # fmt: skip


def error_line(key: str, must: str, value: Any, layers: SettingLayers) -> str:
    """`groups_per_step must be ≥ 1, got 0 (trainer.groups_per_step in run.toml)`."""
    name = key.rsplit(".", 1)[-1]
    return (
        f"{name} {must}, got {printable_value(key, value)} ({key} in {setting_origin(key, layers)})"
    )


def error_lines(error: ValidationError, layers: SettingLayers, model: type[BaseModel]) -> str:
    """One per wrong setting of `model`, in pydantic's order."""
    lines: dict[str, str] = {}
    for details in error.errors(include_url=False):
        key = _key(details["loc"], model)
        lines.setdefault(
            key, _line(key, details, layers, model)
        )  # of a union pydantic reports each member: the first line stays
    return "\n".join(lines.values())


def setting_origin(key: str, layers: SettingLayers) -> str:
    """Returns the setting origin for a table, that of one of its settings; else "the defaults"."""
    inside = (where for name, where in layers.origins.items() if name.startswith(f"{key}."))
    return layers.origins.get(key.partition("[")[0]) or next(inside, "the defaults")


def printable_value(key: str, value: Any, write: Callable[[Any], str] = repr) -> str:
    """Returns the printable value without secrets, cut to `VALUE_CHARACTERS_MAX` characters."""
    if _SECRET.search(key):
        return "(not shown)"
    text = _USERINFO.sub("//***@", "null" if value is None else write(_without_secrets(value)))
    return text if len(text) <= VALUE_CHARACTERS_MAX else text[:VALUE_CHARACTERS_MAX] + "…"


def _without_secrets(value: Any) -> Any:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        inside = cast(dict[str, Any], value)
        return {
            k: "(not shown)" if _SECRET.search(k) else _without_secrets(v)
            for k, v in inside.items()
        }
    if isinstance(value, list | tuple):
        return [_without_secrets(item) for item in cast(list[Any], value)]
    return value


def nearest_key(key: str, keys: list[str]) -> str | None:
    """The key that the user probably meant: the outermost of that name in another table, else of a
    close spelling in the same table, else in another one.
    """
    table, _, name = key.rpartition(".")
    table_keys = [k for k in keys if k.rpartition(".")[0] == table]
    same = sorted((k for k in keys if k.rpartition(".")[2] == name), key=lambda k: k.count("."))
    return next(iter([*same, *_similar_keys(name, table_keys), *_similar_keys(name, keys)]), None)


def _similar_keys(name: str, keys: list[str]) -> list[str]:
    by_name = {k.rpartition(".")[2]: k for k in keys}
    return [by_name[close] for close in get_close_matches(name, by_name, n=1, cutoff=0.6)]


def _line(key: str, details: ErrorDetails, layers: SettingLayers, model: type[BaseModel]) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        hint = _hint(key, details, layers, model)
        return f"unknown key {key} in {setting_origin(key, layers)}; {hint}"
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
    # Elsewhere only lists of a fixed length have required entries.
    if kind == "missing":
        return error_line(key, "must have more entries", details["input"], layers)
    requirement = _KINDS.get(kind.split("_")[0])
    # An option (`task.options.path`) has a union type, and `loc` then ends with the union's member.
    if kind.endswith(("_type", "_parsing")) and requirement:
        parts = re.findall(r"[^.\[\]]+", key)  # of `task.parts[0].name`: four
        if key not in setting_types(model) and len(details["loc"]) > len(parts):
            requirement = "a number, true or false, or text"
            requirement += (
                ", or a list of these"
                if "list" in str(setting_types(model).get(_table(key)))
                else ""
            )
        return error_line(key, f"must be {requirement}", details["input"], layers)
    return error_line(key, f"is refused: {details['msg']}", details["input"], layers)


def _hint(key: str, details: ErrorDetails, layers: SettingLayers, model: type[BaseModel]) -> str:
    if key in REMOVED_SETTINGS:
        return "this setting was removed; delete it"
    keys = _known(key, model)
    if setting_origin(key, layers).startswith(ENVIRONMENT_ORIGIN) and (
        meant := _undotted(key, keys)
    ):
        variable = ENVIRONMENT_PREFIX + meant.upper().replace(".", "__")
        return f"nearest known: {meant}, which is {variable}: a dot is two underscores there"
    foreign = _foreign_hint(key, details["input"])
    if foreign:
        return foreign
    tables = sorted({name.split(".")[0] for name in keys if "." in name})
    nearest = nearest_key(key, tables if isinstance(details["input"], dict) else keys)
    if nearest:
        return f"nearest known: {nearest}"
    table = key.rpartition(".")[0]
    inside = [name.rpartition(".")[2] for name in keys if name.startswith(f"{table}.")]
    return f"known there: {', '.join(inside if table else tables)}"


def _undotted(key: str, keys: list[str]) -> str | None:
    """The setting that the key names if one underscore stands for a dot in it."""
    flat = {name.replace(".", "_"): name for name in keys if "." in name}
    near = get_close_matches(key.replace(".", "_"), flat, n=1, cutoff=0.85)
    return flat[near[0]] if near else None


def _foreign_hint(key: str, value: Any) -> str:
    name = key.rpartition(".")[2]
    if name in FOREIGN_NAMES:
        return f"here it is {FOREIGN_NAMES[name]}"
    if not isinstance(value, dict):
        return ""
    inside = cast(dict[str, Any], value)
    inner_hints = (
        _foreign_hint(f"{key}.{inner}", inner_value) for inner, inner_value in inside.items()
    )
    hints = [
        hint if isinstance(inner_value, dict) else f"{key}.{inner}: {hint}"
        for (inner, inner_value), hint in zip(inside.items(), inner_hints, strict=True)
        if hint
    ]
    return ", ".join(hints)


def _table(key: str) -> str:
    return key.rpartition(".")[0]


def _known(key: str, model: type[BaseModel]) -> list[str]:
    types = setting_types(model)
    name, bracket, _ = key.partition("[")
    if not bracket:
        return list(types)
    item = next(kind for kind in get_args(types[name]) if kind is not Ellipsis)
    return [f"{_table(key)}.{field}" for field in setting_types(item)]


def _key(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """The dotted key of pydantic's place: the setting, or one name further inside a table of
    options (`task.options.path`) or a list of tables (`task.parts[0].name`).
    """
    types = setting_types(model)
    for depth in range(1, len(location) + 1):
        key = ".".join(map(str, location[:depth]))
        if key in types:
            inside = location[depth : depth + 2]
            if len(inside) == 2 and isinstance(inside[0], int):  # a list of tables
                return f"{key}[{inside[0]}].{inside[1]}"
            option = location[depth] if len(location) > depth else None
            is_table = "dict" in str(types[key])
            return f"{key}.{option}" if is_table and isinstance(option, str) else key
    return ".".join(map(str, location))
