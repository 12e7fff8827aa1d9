"""Decides which versions a relay keeps within its bounds. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """A version with objects that are here or arriving, and the bytes that it takes. A delta
    applies to `base`.
    """

    version: Version
    bytes: int
    base: Version | None = None


def versions_to_keep(holdings: Sequence[CachedVersion], versions_max: int, bytes_max: int) -> frozenset[Version]:
    """The versions to keep: the newest `versions_max` that fit, newest first; then the bases that
    kept deltas need, as far as they fit, each chain from its top.

    A base that does not fit ends its chain: readers get the rest from the bucket.
    """
    known = {holding.version: holding for holding in holdings}
    kept: set[Version] = set()
    room = bytes_max
    newest = sorted(known, reverse=True)[:versions_max]
    for version in newest:
        if known[version].bytes <= room:
            kept.add(version)
            room -= known[version].bytes
    for version in [version for version in newest if version in kept]:
        for base in _bases(version, known):
            if base not in kept:
                if known[base].bytes > room:
                    break
                kept.add(base)
                room -= known[base].bytes
    return frozenset(kept)


def _bases(version: Version, known: Mapping[Version, CachedVersion]) -> list[Version]:
    found: list[Version] = []
    base = known[version].base
    while base is not None and base in known and base not in found:
        found.append(base)
        base = known[base].base
    return found
