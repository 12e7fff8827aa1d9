"""Settings of storage: the model, published versions, checkpoints, relays. `Scope` states which
settings may change between two starts of a run.
"""

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollstream.storage.stores.base import content_hash


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


class LoraSettings(Settings):
    """A low-rank adapter that is trained in place of the model's own weights, which stay frozen
    (docs/explanation/lora.md).
    """

    rank: int = Field(default=0, ge=0, le=512)
    """Rank of the adapter's matrices; 0: all weights are trained, without an adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """Names of the linear layers that get an adapter (`q_proj`, …); `all-linear`: every one but the
    head.
    """


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
    lora: LoraSettings = LoraSettings()
    """Train a low-rank adapter instead of all weights."""


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


class RelaySettings(Settings):
    """The relay of this node: its cache of versions, which also serves its neighbours."""

    enabled: bool = False
    """Start a relay, read versions through it, and let the trainer push to the chain. On a single
    machine the store itself is as fast.
    """
    folder: str = ""
    """Folder in memory for the versions; default `/dev/shm/rollstream-<user>-<hash of the run's
    folder>`.
    """
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` if neighbours are other machines, with a shared secret in
    ROLLSTREAM_RELAY_TOKEN (docs/explanation/relay.md).
    """
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: a free one."""
    url: str = ""
    """URL (`http://HOST:PORT`) for neighbours, and for rollouts that cannot open the folder;
    default: from `host` and `port`, with the machine's name for `0.0.0.0`.
    """
    versions: int = Field(default=3, ge=1, le=64)
    """Number of newest versions kept, besides the bases of their deltas where those fit."""
    bytes_max: int = Field(default=8 << 30, ge=1 << 20)
    """Most bytes kept."""
    connections_max: int = Field(default=64, ge=2)
    """Requests served at the same time; more are refused."""
    send_bytes_per_s: float = Field(default=0.0, ge=0)
    """Limit of what it sends, for links that others use too; 0: none."""
    status_s: float = Field(default=0.5, gt=0)
    """Seconds between two status records (heartbeats)."""
    timeout_s: float = Field(default=5.0, gt=0)
    """A relay without a heartbeat for this long is left out of the chain."""
    patience_s: float = Field(default=15.0, gt=0)
    """An announced version that the neighbour does not offer within this time comes from the
    bucket.
    """
    push_bytes_max: int = Field(default=1 << 30, ge=0)
    """Most bytes of objects that each process of the trainer holds for the push, and as many for
    background uploads. An object that does not fit is not pushed and comes from the bucket. 0:
    nothing is pushed.
    """


def folder_for(settings: RelaySettings, run_folder: Path) -> Path:
    """The relay's folder, the same for all processes of a node and a run."""
    if settings.folder:
        return Path(settings.folder)
    digest = content_hash(str(run_folder.absolute()).encode())[:12]
    return Path(f"/dev/shm/rollstream-{os.getuid()}-{digest}")
