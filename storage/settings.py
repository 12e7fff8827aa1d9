"""Settings of storage: the model, published versions, checkpoints, relays. `Settings` is the base
of all tables of the configuration, here and elsewhere; `Scope` states whether a setting may change
between two starts of a run.

The docstring under a field is its documentation: the commands print it, and
docs/reference/settings.md is generated from it.
"""

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollstream.storage.stores.base import content_hash


class Scope(Enum):
    """Whether a setting may change between two starts of a run; the values are the words in the
    documentation. A scope is declared on the setting (`Annotated[int, INCIDENTAL]`), or on its
    table for all settings that declare none; the default is `ESSENTIAL`.
    """

    ESSENTIAL = "accepted"
    """It may change only if the start has the option `--accept-config`. It holds from the step
    after the newest checkpoint on.
    """
    PROMPTED = "group"
    """The same, but it is part of prompts, and those that are published stay as they are: it holds
    from the next published group on, which the start and the ledger name.
    """
    TAKEN = "take"
    """The same, but takes that the ledger holds keep it, also where they are trained again: it
    holds from the next recorded take on.
    """
    INCIDENTAL = "yes"
    """It may change: it decides where and when work is done, not what a trajectory teaches."""
    FIXED = "no"
    """It may not change: it locates log and store, or checkpoints are meaningless without it."""


ESSENTIAL, PROMPTED, TAKEN = Scope.ESSENTIAL, Scope.PROMPTED, Scope.TAKEN
INCIDENTAL, FIXED = Scope.INCIDENTAL, Scope.FIXED


class Settings(BaseModel):
    """Base of every table of the configuration. Its values cannot be changed, and unknown keys are
    errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


RANK_MAX = 512
MEMORY_FILE_BYTES = 96 << 20
"""A rollout holds versions up to this size in memory, larger ones in a file in `TMPDIR`."""


class LoraSettings(Settings):
    """A low-rank adapter (LoRA), which is trained in place of the model's own weights; these stay
    frozen (docs/explanation/lora.md).
    """

    path: str | None = None
    """Folder of an adapter to start from, as PEFT or `rollstream weights export` wrote it; rank,
    alpha and targets are then those of the adapter. Default: a new adapter, which changes nothing.
    """
    rank: int = Field(default=0, ge=0, le=RANK_MAX)
    """Rank of the adapter's matrices; 0: all weights are trained, without an adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """The product of the adapter's two matrices is multiplied by alpha / rank."""
    targets: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """Names of the linear layers that get an adapter (`q_proj`, …); `all-linear`: all of them but
    the head.
    """


class ModelSettings(Settings):
    """The policy model at the start of a run."""

    path: str | None = None
    """Hugging Face checkpoint to start from: a folder, or the Hub name of a model in this machine's
    cache. The host that begins the run puts it into the run's store; no other host needs it.
    Without it the run builds a model from scratch and trains it in the task's warm-up.
    """
    architecture: str = "Qwen3ForCausalLM"
    """Class of the library transformers to build from scratch."""
    config: dict[str, int | float | bool | str] = Field(default_factory=dict)
    """Fields of the configuration of `architecture` (hidden_size, num_hidden_layers, …)."""
    lora: LoraSettings = LoraSettings()
    """Train a low-rank adapter instead of all weights."""


class WeightsSettings(Settings):
    """How versions are published and kept."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the published tensors; the trainer's own weights (masters) stay float32. It never
    changes in a run that trains an adapter, whose base is rounded to it.
    """
    shard_bytes: int = Field(default=256 << 20, ge=1)
    """Largest size, in bytes, of a version's safetensors file; one tensor alone may exceed it."""
    deltas: Annotated[bool, INCIDENTAL] = True
    """Publish versions as differences (deltas) from the previous version, with a full version
    (anchor) in between; false: every version in full.
    """
    anchor_every: Annotated[int, INCIDENTAL] = Field(default=25, ge=1)
    """Publish a full version (anchor) at least every so many versions, and at least every
    `versions_max` / 2.
    """
    versions_max: Annotated[int, INCIDENTAL] = Field(default=16, ge=2)
    """Most versions kept, including the newest one, those still in use, and full versions (anchors)
    on which kept deltas are based.
    """
    keep_every: Annotated[int, INCIDENTAL] = Field(default=0, ge=0)
    """Versions whose number is a multiple of this are kept before other unused ones, for later
    evaluation, as far as `versions_max` allows; 0: none.
    """


class CheckpointSettings(Settings):
    """When the trainer's whole state is saved, from which a restarted trainer continues."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints kept."""


class RelaySettings(Settings):
    """The relay of this node: its cache of versions, which also serves the relays of other nodes
    (its neighbours). The relays form a chain: each reads from the one before it, the first gets new
    versions from the trainer or the object store.
    """

    enabled: bool = False
    """Start a relay, read versions through it, and let the trainer send (push) new versions to the
    chain. On a single machine the object store itself is as fast.
    """
    folder: str = ""
    """Folder in memory for the versions; default: `/dev/shm/rollstream-<user id>-<hash of the path
    of the run's folder>`.
    """
    host: str = "127.0.0.1"
    """Address to listen on. `0.0.0.0`, if neighbours are other machines, needs a shared secret in
    the environment variable ROLLSTREAM_RELAY_TOKEN (docs/explanation/relay.md).
    """
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: a free one."""
    site: str = ""
    """Name of the site where this process stands, if the run has several: the same for the relays
    of one site, and given to the trainer too. Relays read from those of their site, and only the
    first of them reads over the link between sites.
    """
    url: str = Field(default="", pattern=r"^(http://[^/@?#\s]+)?$")
    """URL (`http://HOST:PORT`) by which neighbours reach the relay, and rollouts that cannot open
    its folder; default: from `host` and `port`, with the machine's name for `0.0.0.0`.
    """
    versions: int = Field(default=3, ge=1, le=64)
    """Number of newest versions kept; versions on which their deltas are based are kept too where
    `bytes_max` has room.
    """
    bytes_max: int = Field(default=8 << 30, ge=1 << 20)
    """Most bytes kept."""
    connections_max: int = Field(default=64, ge=2)
    """Most requests served at the same time; more are refused."""
    send_bytes_per_s: float = Field(default=0.0, ge=0)
    """Most bytes per second that the relay sends, and that each process of the trainer pushes, for
    networks that others use too; 0: no limit.
    """
    status_s: float = Field(default=0.5, gt=0)
    """Seconds between two status records (heartbeats)."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds without a heartbeat after which a relay is left out of the chain."""
    patience_s: float = Field(default=15.0, gt=0)
    """Seconds without new bytes after which a relay reads an announced version that it lacks from
    the object store, in place of the relay before it.
    """
    push_bytes_max: int = Field(default=1 << 30, ge=0)
    """Most bytes that wait for the push in each process of the trainer, and as many for uploads in
    the background. An object that does not fit is not pushed: relays read it from the object store.
    0: nothing is pushed.
    """


def folder_for(settings: RelaySettings, run_folder: Path) -> Path:
    """Returns the relay's folder, which is the same for all processes of one run on one node."""
    if settings.folder:
        return Path(settings.folder)
    digest = content_hash(str(run_folder.absolute()).encode())[:12]
    return Path(f"/dev/shm/rollstream-{os.getuid()}-{digest}")
