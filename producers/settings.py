"""Settings of what writes trajectories: task, prompts, rollouts, evaluation. One docstring line per
field.
"""

from typing import Literal

from pydantic import Field

from producers.tasks.described import Option
from storage.settings import Settings

OWN_VARIABLES = ("KAFKA_", "AWS_", "ROLLSTREAM_")
"""Prefixes of variables that hold the run's credentials and settings: no task's code gets them."""


class PartSettings(Settings):
    """One task of a mixture."""

    name: str
    """Registered task, or `module:attribute` of one's own."""
    label: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,40}$")
    """What its prompts, trajectories and figures are called; default: its data set or its name."""
    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Its share of the prompts, relative to the other parts."""
    options: dict[str, Option] = Field(default_factory=dict)
    """The task's own parameters."""


class TaskSettings(Settings):
    """What is asked and how an answer is judged."""

    name: str = "remainder"
    """Registered task (`remainder`, `scripted`, `reasoning_gym`, `dataset`, `numbered`,
    `mixture`), or `module:attribute` of one's own.
    """
    options: dict[str, Option] = Field(default_factory=dict)
    """The task's own parameters."""
    parts: tuple[PartSettings, ...] = Field(default=(), max_length=64)
    """The tasks of a `mixture`, each a `[[task.parts]]`."""
    template: Literal["chat", "plain"] = "chat"
    """How a task of text asks: by the tokenizer's chat template, or the text as it stands."""
    system: str = ""
    """System message before chat messages that have none."""
    tokenizer: str | None = None
    """Folder with the tokenizer of a task of text; default: the model's."""
    reward_timeout_s: float = Field(default=10.0, gt=0)
    """A reward that takes longer kills its process; the trajectory ends as dead with this reason.
    """
    reward_processes: int = Field(default=1, ge=1)
    """Processes that compute rewards, per rollout."""
    reward: Literal["inline", "late"] = "inline"
    """`inline`: rollouts judge what they generate. `late`: they publish it without a reward, which
    a scorer brings as an annotation (docs/late-rewards.md).
    """
    environment: tuple[str, ...] = Field(default=(), max_length=64)
    """Environment variables that rewards, environments and scorers get from their role, besides
    the usual ones (docs/tasks.md); credentials of the run itself are refused.
    """


class ScoringSettings(Settings):
    """Scorers, which write annotations about finished trajectories."""

    count: int = Field(default=0, ge=0)
    """Scorers that the supervisor starts; more may run elsewhere (`rollstream score`)."""
    names: tuple[str, ...] = Field(default=("reward",), min_length=1, max_length=16)
    """Annotations that a scorer writes about each trajectory."""
    function: str = ""
    """`module:function` that is called with each finished trajectory; empty is the task's own
    judge.
    """
    timeout_s: float = Field(default=60.0, gt=0)
    """A call that takes longer kills its process; the annotations say so instead of a value."""
    processes: int = Field(default=1, ge=1)
    """Processes per scorer, so calls side by side."""


class SamplingSettings(Settings):
    """How training trajectories are drawn."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_k: int = Field(default=0, ge=0)
    """0 is off; training with it is refused, the kept set is not recorded."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """1 is off; training with it is refused, the kept set is not recorded."""
    tokens_max: int = Field(default=420, ge=1)
    """Most generated tokens of a trajectory."""


class VllmSettings(Settings):
    """How the engine `vllm` runs (docs/vllm.md)."""

    process: bool = True
    """vLLM computes in a process of its own; false: in the rollout's, stepped by hand."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What it computes in; `auto` is float32 on the CPU and bfloat16 on a GPU."""
    kv_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Memory of the KV cache; default: on the CPU every slot may be full, on a GPU what
    `memory_share` leaves.
    """
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that one engine takes."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """GPUs of one engine."""
    head_float32: bool = True
    """Logits in float32 whatever `dtype` is, as in the trainer; false where vLLM cannot: a
    quantised head.
    """
    url: str | None = Field(default=None, pattern=r"^https?://[^/@?#\s]+(/[^@?#\s]*)?$")
    """A vLLM server that computes instead (`http://host:8000`), for this rollout alone; what else
    is said here is then the server's to decide.
    """
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with the key that this server asks for."""


class RolloutSettings(Settings):
    """The rollouts of this machine."""

    count: int = Field(default=2, ge=1)
    """Processes that the supervisor starts."""
    engine: str = "torch"
    """`torch` (embedded), `vllm` (docs/vllm.md), or `paced`, which has no model (docs/paced.md)."""
    on_update: Literal["keep_version", "in_flight", "in_flight_recompute"] = "in_flight"
    """How a rollout takes new weights."""
    slots: int = Field(default=64, ge=1)
    """Sequences decoded together."""
    context_max: int = Field(default=512, ge=2)
    """Longest sequence, prompt included."""
    batch_max: int | None = Field(default=None, ge=1)
    """B_max: rows at which a decode step stops being nearly free for another one; default: as the
    engine or its profile says (`rollstream profile`), else `slots`.
    """
    profile: str | None = None
    """The profile of this engine and model; default: the one in the run's folder, if there is one.
    """
    quota: int | None = Field(default=None, ge=1)
    """New trajectories drawn per version under `keep_version`; default 2 × slots."""
    threads: int = Field(default=1, ge=1)
    """Torch threads per rollout."""
    niceness: int = Field(default=0, ge=0, le=19)
    """Gives way to the trainer where they share cores: rollouts run ahead, so the trainer's steps
    are what everybody waits for in the end.
    """
    partial_tokens: int = Field(default=64, ge=1)
    """A partial is published after this many new tokens …"""
    partial_s: float = Field(default=2.0, gt=0)
    """… or after this many seconds, whichever is first."""
    status_s: float = Field(default=0.5, gt=0)
    """Seconds between two status records (heartbeats)."""
    vllm: VllmSettings = VllmSettings()
    """How the engine `vllm` runs, also where it evaluates."""
    drafts: Literal["auto", "history", "off"] = "auto"
    """`history`: guess the next tokens from earlier answers to the same prompt and verify several
    in one pass, where that is faster; what is generated stays the same (docs/histospec.md).
    `auto`: with every engine that can.
    """
    drafts_tokens: int = Field(default=262_144, ge=1024, le=1 << 30)
    """Tokens of earlier answers that a node remembers; each takes 160 to 330 bytes."""
    drafts_window: Literal["marginal", "additive", "multiplicative"] = "marginal"
    """What bounds a draft beside what a token more is worth: nothing up to 32; or how drafts go: 2
    more up to 32 and back to 2, or twice up to 16 and half of it.
    """
    drafts_choice: Literal["priority", "newest", "count"] = "priority"
    """What is guessed where earlier answers differ: what earned most in the newest pass, what came
    last, or what came most often.
    """

    @property
    def has_server(self) -> bool:
        """A vLLM server that others run computes."""
        return self.engine == "vllm" and self.vllm.url is not None

    @property
    def can_draft(self) -> bool:
        """A vLLM server of others guesses as its owner says; `paced` has no model to draft for."""
        return self.engine in ("torch", "vllm") and not self.has_server

    @property
    def is_drafting(self) -> bool:
        """Earlier answers are remembered and guessed from."""
        return self.drafts == "history" or (self.drafts == "auto" and self.can_draft)


class EvaluationSettings(Settings):
    """Evaluation of versions on held-out prompts, beside the run."""

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
