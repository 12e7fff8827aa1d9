"""The form in which a run keeps its settings, in `config.json` and in the store: without those that
came after the first release and have their default. So a run that uses nothing new may be continued
by an earlier release (invariant 14), which refuses the others by name.

A reader takes the default for a missing setting. So the default of an essential setting outside of
`FIRST_RELEASE_SETTINGS` changes only together with an entry there
(tests/config/test_recorded_form.py).
"""

from collections.abc import Mapping
from typing import Any

from rollstream.storage.settings import Settings

_BY_TABLE = {
    "": "bus folder run seed store sync truncate",
    "archive": "enabled roll_bytes roll_s topics",
    "checkpoints": "every keep",
    "dispatch": (
        "group_deadline_s heartbeat_timeout_s keep_s lease_s load_bytes_per_s max_lag "
        "queue_per_slot ready_groups_max repack repack_every_s standby"
    ),
    "evaluation": "enabled every prompts samples slots threads",
    "metrics": "enabled host port stalled_s",
    "model": "architecture config path",
    "paced": (
        "changed_share emit_every kv_tokens time_scale train_step_s train_token_s weights_bytes"
    ),
    "paced.lengths": "correlation median p99 parts trace",
    "paced.roofline": "bandwidth flops kv_token_bytes model_bytes overhead_s profile token_flops",
    "relay": (
        "bytes_max connections_max enabled folder host patience_s port push_bytes_max "
        "send_bytes_per_s status_s timeout_s url versions"
    ),
    "rollouts": (
        "batch_max context_max count drafts drafts_choice drafts_tokens drafts_window engine "
        "niceness on_update partial_s partial_tokens profile quota slots status_s threads"
    ),
    "rollouts.vllm": (
        "api_key_env dtype head_float32 kv_gib memory_share process tensor_parallel url"
    ),
    "sampling": "temperature tokens_max top_k top_p",
    "scoring": "count function names processes timeout_s",
    "task": "name options parts reward reward_processes reward_timeout_s system template tokenizer",
    "trainer": (
        "advantage aggregate annotations betas choose clip_high clip_low compute device "
        "filter_equal_rewards gradient_checkpointing gradient_norm_max groups_per_step learner "
        "lease_s loss lr lr_final lr_ramp_steps micro_batch_tokens processes ranks_timeout_s "
        "ratio ratio_max reward_terms samples_per_group steps survivors_min threads "
        "updates_per_step weight_decay workers"
    ),
    "trainer.reward_terms": "reward",
    "warmup": "documents enabled steps threads",
    "weights": "anchor_every deltas dtype keep_every shard_bytes versions_max",
}
# Those of release 0.1.0, which are kept with any value.
FIRST_RELEASE_SETTINGS = frozenset(
    f"{table}.{name}".lstrip(".") for table, names in _BY_TABLE.items() for name in names.split()
)


def recorded_form(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The essential settings, by dotted key, that the store keeps."""
    return {
        key: value
        for key, value in settings.items()
        if _is_kept(key, value, defaults.get(key, ...))
    }


def file_form(settings: Settings, defaults: Settings, prefix: str = "") -> dict[str, Any]:
    """Returns what `config.json` keeps, nested by table; `prefix` is that of the dotted keys."""
    nested = dict[str, Any]()
    default_values = defaults.model_dump(mode="json")
    for name, value in settings.model_dump(mode="json").items():
        inner, key = getattr(settings, name), f"{prefix}{name}"
        if isinstance(inner, Settings):
            if table := file_form(inner, getattr(defaults, name), f"{key}."):
                nested[name] = table
        elif _is_kept(key, value, default_values[name]):
            nested[name] = value
    return nested


def _is_kept(key: str, value: Any, default: Any) -> bool:
    return key in FIRST_RELEASE_SETTINGS or value != default
