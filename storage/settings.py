"""Settings of storage: the model, published versions, checkpoints."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
    deltas: bool = True
    """Publish versions as differences from the previous version; false: every version in full."""
    anchor_every: int = Field(default=25, ge=1)
    """A full version at least every so many versions and every versions_max / 2; deltas between."""
    versions_max: int = Field(default=16, ge=2)
    """Most versions kept, including the newest one and those still in use."""
    keep_every: int = Field(default=0, ge=0)
    """Multiples of this are kept longest, for later evaluation, within versions_max; 0: none."""


class CheckpointSettings(Settings):
    """When the trainer's whole state is saved."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
