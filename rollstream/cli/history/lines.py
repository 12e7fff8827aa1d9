"""Weight versions and their differences as JSON objects, also the input of the tables."""

from rollstream.storage.weights.manifest import Manifest
from rollstream.storage.weights.verify import TensorDifference
from rollstream.streams.values import Version

VersionLine = dict[str, str | int | float | bool | None]


def version_line(manifest: Manifest, latest: Version | None) -> VersionLine:
    delta = manifest.delta
    return {
        "version": str(manifest.version),
        "kind": manifest.kind,
        "parent": str(manifest.parent) if manifest.parent else None,
        "anchor": str(manifest.anchor),
        "bytes": manifest.bytes,
        "full_bytes": manifest.full_bytes,
        "delta_bytes": None if delta is None else delta.bytes,
        "tensors": len(manifest.weights.tensors),
        "created_s": manifest.created_s,
        "believed": manifest.version == latest,
        "manifest_hash": manifest.hash,
    }


def tensor_lines(manifest: Manifest) -> list[VersionLine]:
    """Returns one object per tensor; tied tensors share one."""
    names: dict[str, list[str]] = {}
    for name, owner in manifest.weights.tied.items():
        names.setdefault(owner, []).append(name)
    lines: list[VersionLine] = []
    for name, entry in manifest.weights.tensors.items():
        delta = manifest.delta and manifest.delta.tensors[name]
        lines.append(
            {
                "tensor": name,
                "tied": ", ".join(names.get(name, ())),
                "dtype": entry.dtype,
                "shape": "×".join(map(str, entry.shape)) or "scalar",
                "bytes": entry.bytes,
                "hash": entry.hash,
                "base": delta.base if delta else None,
                "coding": delta.coding if delta else None,
                "values": delta.values if delta else None,
                "changed": delta.changed if delta else None,
                "delta_bytes": delta.bytes if delta else None,
            }
        )
    return lines


def difference_line(found: TensorDifference) -> VersionLine:
    return {
        "tensor": found.name,
        "elements": found.elements,
        "changed": found.changed,
        "largest": found.largest,
    }
