"""Settings of rollouts and their engines (`RolloutFields`); `producers/settings.py` joins them with
those of other producers.
"""

from typing import Annotated, Literal

from pydantic import Field

from rollstream.storage.settings import ESSENTIAL, Settings

DRAFTS_TOKENS = 262_144
"""Default size, in tokens, of a node's draft history; vLLM's workers assume it."""
EngineArgument = bool | int | float | str | list[int | str] | dict[str, object]
"""A value of `rollouts.vllm.args`."""
OWN_ARGUMENTS = {
    "model": "model.path",
    "load_format": "the published versions",
    "skip_tokenizer_init": "the task's tokenizer",
    "generation_config": "[sampling]",
    "dtype": "rollouts.vllm.dtype",
    "max_model_len": "rollouts.context_max",
    "max_num_seqs": "rollouts.slots",
    "hf_overrides": "rollouts.vllm.head_float32",
    "tensor_parallel_size": "rollouts.vllm.tensor_parallel",
    "data_parallel_size": "rollouts.count (the loop drives one replica)",
    "gpu_memory_utilization": "rollouts.vllm.memory_share",
    "num_gpu_blocks_override": "rollouts.vllm.kv_gib",
    "kv_cache_memory_bytes": "rollouts.vllm.kv_gib",
    "enable_prefix_caching": "the engine (a prefix belongs to one version)",
    "logprobs_mode": "the engine (the trainer needs those after the temperature)",
    "async_scheduling": "rollouts.vllm.process",
    "speculative_config": "rollouts.drafts",
    "worker_extension_cls": "the engine",
    "weight_transfer_config": "the engine",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "max_loras": "the engine (several versions side by side)",
    "max_cpu_loras": "the engine (several versions side by side)",
    "lora_target_modules": "model.lora.targets",
}
"""Arguments of vLLM's engine that are refused in `rollouts.vllm.args`, because the run sets them
itself; each with the setting or the part that decides it, for the error's text.
"""


class VllmSettings(Settings):
    """Settings of the engine `vllm` (docs/how-to/vllm.md)."""

    process: bool = True
    """Run vLLM in a process of its own; false: in the rollout's process, whose loop calls each
    decode step.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type in which vLLM computes; `auto` is float32 on the CPU and bfloat16 on a GPU."""
    kv_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Memory of the KV cache in GiB; default: on the CPU enough for `rollouts.slots` longest
    sequences, on a GPU what `memory_share` leaves beside the model.
    """
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that one engine takes."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Number of GPUs over which one engine spreads the model (tensor parallel)."""
    head_float32: bool = True
    """Compute logits in float32 whatever the `dtype`, as the trainer does. Set it to false where
    vLLM cannot do so: with a quantised output layer.
    """
    args: dict[str, EngineArgument] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, under vLLM's names, such as `quantization`,
    `pipeline_parallel_size`, `attention_backend` or a table `kv_transfer_config`.
    """
    url: str | None = Field(default=None, pattern=r"^https?://[^/@?#\s]+(/[^@?#\s]*)?$")
    """URL of a vLLM server (`http://host:8000`) that generates for this rollout alone. The other
    settings of this table, but for `api_key_env`, are then decided by the server's own arguments.
    """
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with the server's API key."""


class RolloutFields(Settings):
    """The fields of the table `[rollouts]`."""

    count: int = Field(default=2, ge=1)
    """Number of rollouts that the supervisor starts."""
    engine: Annotated[str, ESSENTIAL] = "torch"
    """What generates tokens: `torch` (the project's own engine), `vllm` (docs/how-to/vllm.md), or
    `paced`, which has no model and only keeps the pace of one (docs/explanation/paced-engine.md).
    """
    on_update: Annotated[Literal["keep_version", "in_flight", "in_flight_recompute"], ESSENTIAL] = (
        "in_flight"
    )
    """How a rollout takes new weights. `in_flight`: between two decode steps; running trajectories
    continue under the new version, with their KV cache kept. `in_flight_recompute`: the same, with
    the KV cache computed again. `keep_version`: a trajectory ends under the version that it started
    with (docs/how-to/choose-lag-and-loss.md).
    """
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Device of the engine `torch`, also for evaluation; `auto`: CUDA if available."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which the layers of the engine `torch` compute; its output layer stays float32."""
    slots: int = Field(default=64, ge=1)
    """Most sequences that a rollout decodes together."""
    episodes_max: int = Field(default=2048, ge=1)
    """Most dialogues that a rollout has open: in slots, in its engine's queue, or waiting for their
    environment, which takes no slot; at least `slots`.
    """
    context_max: Annotated[int, ESSENTIAL] = Field(default=512, ge=2)
    """Most tokens of a sequence, prompt included. The default is raised for `sampling.tokens_max`
    and, by `rollstream run`, for the longest prompt of a data set, as far as the model goes.
    """
    batch_max: int | None = Field(default=None, ge=1)
    """Batch size above which another sequence makes a decode step notably slower; repack fills a
    rollout up to it. Default: from the engine or its profile (`rollstream profile`), else `slots`.
    """
    profile: str | None = None
    """File with the measured speed of this engine and model (`rollstream profile` writes it);
    default: the one in the run's folder, if any.
    """
    quota: int | None = Field(default=None, ge=1)
    """Most new trajectories that a rollout starts under one version with `keep_version`, once a
    newer version waits; null: 2 × slots. Default under `keep_version`: this, but at most an equal
    share of a step among `count` rollouts.
    """
    threads: int = Field(default=1, ge=1)
    """Torch threads per rollout."""
    niceness: int = Field(default=0, ge=0, le=19)
    """Lowers the priority of the rollouts' processes (Unix niceness). It helps where they share
    cores with the trainer: rollouts run ahead, so the trainer's steps limit the run.
    """
    partial_tokens: int = Field(default=64, ge=1)
    """New tokens of a trajectory after which a partial is published."""
    partial_s: float = Field(default=2.0, gt=0)
    """Seconds after which a partial is published, if fewer than `partial_tokens` are new."""
    status_s: float = Field(default=0.5, gt=0)
    """Seconds between two status records (heartbeats)."""
    vllm: VllmSettings = VllmSettings()
    """Settings of the engine `vllm`, also for evaluation."""
    drafts: Literal["auto", "history", "off"] = "auto"
    """`history`: draft the next tokens from earlier answers to the same prompt, and verify several
    in one pass where that is faster; the generated tokens stay the same
    (docs/explanation/drafts.md). `auto`: `history` with every engine that can draft, else `off`.
    """
    drafts_tokens: int = Field(default=DRAFTS_TOKENS, ge=1024, le=1 << 30)
    """Most tokens of earlier answers that a node keeps for drafts; each takes 160 to 330 bytes."""
    drafts_window: Literal["marginal", "additive", "multiplicative"] = "marginal"
    """Most tokens of a draft; within it the expected gain decides. `marginal`: always 32.
    `additive`: 2 more after a wholly accepted draft, up to 32, else 2 again. `multiplicative`:
    twice as many after a wholly accepted draft, up to 16, else half.
    """
    drafts_choice: Literal["priority", "newest", "count"] = "priority"
    """Which continuation is drafted where earlier answers differ. `priority`: the one with the
    highest reward in the newest pass over the prompts. `newest`: the newest. `count`: the most
    frequent.
    """
