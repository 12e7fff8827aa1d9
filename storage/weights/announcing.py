"""The record on the `weights` topic that announces a version."""

from rollstream.storage.weights.manifest import Manifest, manifest_key
from rollstream.streams.records import WeightsAnnounced


def announcement(manifest: Manifest, time_s: float) -> WeightsAnnounced:
    """The announcement of this manifest: the same from every caller, except for the time."""
    return WeightsAnnounced(
        run=manifest.run,
        version=manifest.version,
        manifest=manifest_key(manifest.version),
        manifest_hash=manifest.hash,
        kind=manifest.kind,
        parent=manifest.parent,
        bytes=manifest.bytes,
        time_s=time_s,
    )
