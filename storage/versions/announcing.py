"""What the `weights` topic says of a version: a manifest in the words of its announcement."""

from storage.manifest import Manifest, manifest_key
from streams.records import WeightsAnnounced


def announcement(manifest: Manifest, time_s: float) -> WeightsAnnounced:
    """The same for whoever makes it, but for the time."""
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
