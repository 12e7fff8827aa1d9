"""Settings of a node's relay."""

import os
from pathlib import Path

from pydantic import Field

from rollstream.storage.settings import Settings
from rollstream.storage.stores.base import content_hash


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
    """Most bytes of objects that the trainer holds for the push, and as many for background
    uploads. An object that does not fit is not pushed and comes from the bucket. 0: nothing is
    pushed.
    """


def folder_for(settings: RelaySettings, run_folder: Path) -> Path:
    """The relay's folder, the same for all processes of a node and a run."""
    if settings.folder:
        return Path(settings.folder)
    digest = content_hash(str(run_folder.absolute()).encode())[:12]
    return Path(f"/dev/shm/rollstream-{os.getuid()}-{digest}")
