"""Settings of storage: the model, published versions, checkpoints. `Scope` states which settings
may change between two starts of a run.
"""

from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Scope(Enum):
    """Whether a setting may change between two starts of a run. It is declared on the setting
    (`Annotated[int, INCIDENTAL]`), or on its table for all settings that declare none.
    """

    ESSENTIAL = "accepted"
    """With `--accept-config` only; the default."""
    INCIDENTAL = "yes"
    """It changes where and when work is done, not the learning from a trajectory."""
    FIXED = "no"
    """It locates log and store, or a checkpoint is meaningless without it."""


ESSENTIAL, INCIDENTAL, FIXED = Scope.ESSENTIAL, Scope.INCIDENTAL, Scope.FIXED


class Settings(BaseModel):
    """Base of every table of the configuration: frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSettings(Settings):
    """The policy model at the start of a run."""

    path: str | None = None
    """Hugging Face checkpoint to start from: a folder, or a Hub name that is in this machine's
    cache. Without it the task's warm-up creates one.
    """
    architecture: str = "Qwen3ForCausalLM"
    """Class of transformers to build from scratch."""
    config: dict[str, int | float | bool | str] = Field(default_factory=dict)
    """Fields of that architecture's configuration (hidden_size, num_hidden_layers, …)."""


class WeightsSettings(Settings):
    """How versions are published and retained."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the published tensors; masters stay float32."""
    shard_bytes: int = Field(default=256 << 20, ge=1)
    """Largest safetensors file of a version."""
    deltas: Annotated[bool, INCIDENTAL] = True
    """Publish versions as differences from the previous version; false: every version in full."""
    anchor_every: Annotated[int, INCIDENTAL] = Field(default=25, ge=1)
    """A full version at least every so many versions and every versions_max / 2; deltas between."""
    versions_max: Annotated[int, INCIDENTAL] = Field(default=16, ge=2)
    """Most versions kept, including the newest one and those still in use."""
    keep_every: Annotated[int, INCIDENTAL] = Field(default=0, ge=0)
    """Multiples of this are kept longest, for later evaluation, within versions_max; 0: none."""


class CheckpointSettings(Settings):
    """When the trainer's whole state is saved."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
