"""Settings of everything that writes trajectories: task, prompts, rollouts, evaluation. One
docstring line per field.
"""

from typing import Annotated, Literal

from pydantic import Field

from rollstream.producers.tasks.base import Option
from rollstream.storage.settings import ESSENTIAL, INCIDENTAL, Settings

OWN_VARIABLES = ("KAFKA_", "AWS_", "ROLLSTREAM_")
"""Prefixes of the variables with the run's credentials and settings; a task's code gets none of
them.
"""


class PartSettings(Settings):
    """One task of a mixture."""

    name: str
    """Registered task, or `module:attribute` of your own."""
    label: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,40}$")
    """Name of the part in prompts, trajectories and metrics; default: its data set or its name."""
    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Its share of the prompts, relative to the other parts."""
    options: dict[str, Option] = Field(default_factory=dict)
    """The task's own parameters."""


class TaskSettings(Settings):
    """The prompts of the run, and how their answers are judged."""

    name: str = "remainder"
    """Registered task (`remainder`, `scripted`, `reasoning_gym`, `dataset`, `numbered`, `mixture`),
    or `module:attribute` of your own.
    """
    options: dict[str, Option] = Field(default_factory=dict)
    """The task's own parameters."""
    parts: tuple[PartSettings, ...] = Field(default=(), max_length=64)
    """The tasks of a `mixture`, each a `[[task.parts]]`."""
    template: Literal["chat", "plain"] = "chat"
    """How a text task builds its prompts: by the tokenizer's chat template, or from the
    text alone.
    """
    system: str = ""
    """System message for chats without one."""
    tokenizer: str | None = None
    """Folder with the tokenizer of a text task; default: the model's."""
    reward_timeout_s: Annotated[float, INCIDENTAL] = Field(default=10.0, gt=0)
    """A reward that takes longer kills its process; the trajectory ends dead with this reason."""
    reward_processes: Annotated[int, INCIDENTAL] = Field(default=1, ge=1)
    """Processes that compute rewards, per rollout."""
    reward: Literal["inline", "late"] = "inline"
    """`inline`: rollouts compute the rewards of their trajectories. `late`: trajectories are
    published without a reward, and a scorer adds it as an annotation (docs/how-to/late-rewards.md).
    """
    environment: Annotated[tuple[str, ...], INCIDENTAL] = Field(default=(), max_length=64)
    """Environment variables that rewards, environments and scorers get from their role, besides the
    usual ones (docs/reference/tasks.md); the run's own credentials are refused.
    """


class ScoringSettings(Settings):
    """Scorers, which write annotations about finished trajectories."""

    count: Annotated[int, INCIDENTAL] = Field(default=0, ge=0)
    """Scorers that the supervisor starts; more may run elsewhere (`rollstream score`)."""
    names: tuple[str, ...] = Field(default=("reward",), min_length=1, max_length=16)
    """Annotations that a scorer writes about each trajectory."""
    function: str = ""
    """`module:function` that is called with each finished trajectory; empty: the task's
    own judge.
    """
    timeout_s: Annotated[float, INCIDENTAL] = Field(default=60.0, gt=0)
    """A call that takes longer kills its process; the annotations record this reason
    and no value.
    """
    processes: Annotated[int, INCIDENTAL] = Field(default=1, ge=1)
    """Processes per scorer, which is the number of concurrent calls."""


class SamplingSettings(Settings):
    """Sampling parameters of training trajectories."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_k: int = Field(default=0, ge=0)
    """0 is off. Training with it is refused, because the set of kept tokens is not recorded."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """1 is off. Training with it is refused, because the set of kept tokens is not recorded."""
    tokens_max: int = Field(default=420, ge=1)
    """Most generated tokens of a trajectory."""


EngineArgument = bool | int | float | str | list[str] | dict[str, object]
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
"""Arguments of vLLM's engine that a run sets itself, each with its setting; they are refused in
`rollouts.vllm.args`.
"""


class VllmSettings(Settings):
    """Settings of the engine `vllm` (docs/how-to/vllm.md)."""

    process: bool = True
    """Run vLLM in its own process; false: in the rollout's process, stepped by its loop."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of its computation; `auto` is float32 on the CPU and bfloat16 on a GPU."""
    kv_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Memory of the KV cache in GiB; default: on the CPU enough for full slots, on a GPU what
    `memory_share` leaves.
    """
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that one engine takes."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """GPUs of one engine."""
    head_float32: bool = True
    """Compute logits in float32 for every `dtype`, as the trainer does; false where vLLM cannot: a
    quantised head.
    """
    args: dict[str, EngineArgument] = Field(default_factory=dict)
    """Further arguments of vLLM's engine by their names there, such as `quantization`,
    `pipeline_parallel_size`, `attention_backend` or a table `kv_transfer_config`.
    """
    url: str | None = Field(default=None, pattern=r"^https?://[^/@?#\s]+(/[^@?#\s]*)?$")
    """A vLLM server (`http://host:8000`) that generates for this rollout alone. The other settings
    of this section are then the server's.
    """
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with the server's API key."""


class RolloutSettings(Settings):
    """The rollouts of this machine."""

    count: int = Field(default=2, ge=1)
    """Processes that the supervisor starts."""
    engine: Annotated[str, ESSENTIAL] = "torch"
    """`torch` (embedded), `vllm` (docs/how-to/vllm.md), or `paced`, which has no model
    (docs/explanation/paced-engine.md).
    """
    on_update: Annotated[Literal["keep_version", "in_flight", "in_flight_recompute"], ESSENTIAL] = (
        "in_flight"
    )
    """How a rollout takes new weights."""
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Device of the engine `torch`, also for evaluation; `auto`: CUDA if available."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which the layers of the engine `torch` compute; its head stays float32."""
    slots: int = Field(default=64, ge=1)
    """Sequences decoded together."""
    context_max: Annotated[int, ESSENTIAL] = Field(default=512, ge=2)
    """Longest sequence, prompt included."""
    batch_max: int | None = Field(default=None, ge=1)
    """B_max: rows above which another row makes a decode step notably slower; default: from the
    engine or its profile (`rollstream profile`), else `slots`.
    """
    profile: str | None = None
    """Profile of this engine and model; default: the one in the run's folder, if any."""
    quota: int | None = Field(default=None, ge=1)
    """New trajectories drawn per version under `keep_version`; default 2 × slots."""
    threads: int = Field(default=1, ge=1)
    """Torch threads per rollout."""
    niceness: int = Field(default=0, ge=0, le=19)
    """Lowers the rollouts' priority where they share cores with the trainer: rollouts run ahead, so
    the trainer's steps limit the run.
    """
    partial_tokens: int = Field(default=64, ge=1)
    """A partial is published after this many new tokens …"""
    partial_s: float = Field(default=2.0, gt=0)
    """… or after this many seconds, whichever is first."""
    status_s: float = Field(default=0.5, gt=0)
    """Seconds between two status records (heartbeats)."""
    vllm: VllmSettings = VllmSettings()
    """Settings of the engine `vllm`, also for evaluation."""
    drafts: Literal["auto", "history", "off"] = "auto"
    """`history`: draft the next tokens from earlier answers to the same prompt, and verify several
    in one pass where that is faster; the generated tokens stay the same
    (docs/explanation/drafts.md). `auto`: with every engine that can.
    """
    drafts_tokens: int = Field(default=262_144, ge=1024, le=1 << 30)
    """Tokens of earlier answers in a node's draft history; each takes 160 to 330 bytes."""
    drafts_window: Literal["marginal", "additive", "multiplicative"] = "marginal"
    """Limit of a draft's length besides the expected gain. `marginal`: 32 tokens. `additive`: 2
    more, up to 32, after a wholly accepted draft, else back to 2. `multiplicative`: twice as many
    up to 16, or half.
    """
    drafts_choice: Literal["priority", "newest", "count"] = "priority"
    """Which continuation is drafted where earlier answers differ: the one with the highest reward
    in the newest pass, the newest, or the most frequent.
    """

    @property
    def has_server(self) -> bool:
        """Whether an external vLLM server generates."""
        return self.engine == "vllm" and self.vllm.url is not None

    @property
    def can_draft(self) -> bool:
        """False for an external vLLM server, whose owner decides on drafts, and for `paced`, which
        has no model.
        """
        return self.engine in ("torch", "vllm") and not self.has_server

    @property
    def is_drafting(self) -> bool:
        """Whether a draft history is kept and used."""
        return self.drafts == "history" or (self.drafts == "auto" and self.can_draft)


class EvaluationSettings(Settings):
    """Evaluation of versions on held-out prompts, in a role of its own."""

    enabled: bool = True
    """Start the role."""
    every: int = Field(default=10, ge=1)
    """Versions between evaluations; version 0 and the last one are always evaluated."""
    prompts: int = Field(default=200, ge=1)
    """Held-out prompts."""
    samples: int = Field(default=2, ge=1)
    """Samples per prompt at temperature 1, besides one greedy answer."""
    slots: int = Field(default=128, ge=1)
    """Sequences decoded together."""
    threads: int = Field(default=1, ge=1)
    """Torch threads."""
