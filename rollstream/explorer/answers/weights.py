"""Answers `weights`: the kept versions, who holds which, and the chain of relays."""

import threading
import time
from collections.abc import Mapping
from typing import Any

from rollstream.analysis.locate import RunLocation
from rollstream.analysis.looking import open_run_store
from rollstream.errors import CorruptObject, ObjectMissing, RollstreamError
from rollstream.explorer.explored_run import ExploredRun
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.manifest import Manifest, read_manifest
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.storage.weights.retention import stored_versions
from rollstream.streams.records import RelayStatus, RolloutStatus, WeightsAnnounced
from rollstream.streams.values import Version

VERSIONS_MAX = 512
APPLIED_MAX = 2000
LISTED_S = 5.0  # a listing of the store is repeated no sooner


class StoredWeights:
    """Reads the versions in one run's store, a listing at most every `LISTED_S` seconds; manifests
    never change and are read once.
    """

    def __init__(self, location: RunLocation) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._store: ObjectStore | None = None
        self._manifests: dict[Version, Manifest] = {}
        self._listed_s = float("-inf")
        self._lines: list[dict[str, Any]] = []
        self.latest: int | None = None

    def lines(self) -> list[dict[str, Any]]:
        """Returns one object per stored version, newest first."""
        with self._lock:
            now = time.monotonic()
            if now - self._listed_s > LISTED_S:
                self._lines = self._list()
                self._listed_s = now
            return self._lines

    def _list(self) -> list[dict[str, Any]]:
        store = self._store = self._store or open_run_store(self._location)
        pointer = believed_pointer(store)
        believed = None if pointer is None else pointer.version
        self.latest = None if believed is None else believed.number
        found: list[dict[str, Any]] = []
        newest = sorted(stored_versions(store), key=lambda s: s.version, reverse=True)
        for stored in newest[:VERSIONS_MAX]:
            manifest = self._manifest(store, stored.version)
            found.append(_line(stored.version, manifest))
        return found

    def _manifest(self, store: ObjectStore, version: Version) -> Manifest | None:
        if version not in self._manifests:
            try:
                self._manifests[version] = read_manifest(store, version)
            except (ObjectMissing, CorruptObject):
                return None
            if len(self._manifests) > VERSIONS_MAX:
                self._manifests.pop(min(self._manifests))
        return self._manifests[version]


def show_weights(run: ExploredRun, stored: StoredWeights) -> dict[str, Any]:
    """Answers `weights`. Without a store the versions are those that rollouts served."""
    note = ""
    lines: list[dict[str, Any]] = []
    if run.location.has_store:
        try:
            lines = stored.lines()
        except RollstreamError as error:
            note = f"the store cannot be read: {error}"
    holders, relays = _holders(run)
    by_version: dict[int, list[str]] = {}
    for holder in holders:
        for version in holder["versions"]:
            by_version.setdefault(version, []).append(holder["name"])
    announced = _announced(run)
    versions = [
        {**line, "holders": by_version.get(line["version"], []),
         "announced_s": announced.get(line["name"])}
        for line in lines
    ]  # fmt: skip
    applied = run.index.rows(
        "SELECT time_s, rollout, version, seconds FROM served "
        f"ORDER BY time_s DESC LIMIT {APPLIED_MAX}"
    )
    return {
        "latest": stored.latest,
        "versions": versions,
        "holders": holders,
        "relays": relays,
        "applied": [list(row.values()) for row in reversed(applied)],
        "note": note or ("" if versions else "the store holds no weights (any more)"),
    }


def _line(version: Version, manifest: Manifest | None) -> dict[str, Any]:
    head = {"version": version.number, "term": version.term, "name": str(version)}
    if manifest is None:
        absent = (
            "parent",
            "anchor",
            "bytes",
            "full_bytes",
            "changed",
            "files",
            "tensors",
            "created_s",
        )
        return {**head, "kind": "unfinished", "hash": "", **dict.fromkeys(absent)}
    delta = manifest.delta
    return {
        **head,
        "kind": manifest.kind,
        "parent": str(manifest.parent) if manifest.parent else None,
        "anchor": str(manifest.anchor),
        "bytes": manifest.bytes,
        "full_bytes": manifest.full_bytes,
        "changed": None if delta is None else sum(one.changed for one in delta.tensors.values()),
        "files": len(manifest.weights.files) + (0 if delta is None else len(delta.files)),
        "tensors": len(manifest.weights.tensors),
        "created_s": manifest.created_s,
        "hash": manifest.hash,
    }


def _announced(run: ExploredRun) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for one in run.records.newest("weights").values():
        if isinstance(one.record, WeightsAnnounced):
            found[str(one.record.version)] = one.record.time_s
    return found


def _holders(run: ExploredRun) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns who holds which versions, by the newest heartbeats, and the relays' chain."""
    served = run.index.rows(
        "SELECT * FROM served QUALIFY row_number() OVER "
        "(PARTITION BY rollout ORDER BY rollout_term DESC, time_s DESC) = 1 ORDER BY rollout"
    )
    rollouts: dict[str, RolloutStatus] = {}
    relays: dict[str, RelayStatus] = {}
    for one in run.records.newest("status").values():
        record = one.record
        if isinstance(record, RolloutStatus):
            known = rollouts.get(record.rollout)
            if known is None or (known.term, known.time_s) < (record.term, record.time_s):
                rollouts[record.rollout] = record
        elif isinstance(record, RelayStatus):
            before = relays.get(record.relay)
            if before is None or before.term <= record.term:
                relays[record.relay] = record
    found = [_rollout(row, rollouts.get(row["rollout"])) for row in served]
    found += [_relay(one) for one in relays.values()]
    upstream = {one.relay: one.upstream.partition("/")[0] for one in relays.values()}
    chain = [
        {"relay": name, "upstream": above, "depth": _depth(name, upstream)}
        for name, above in sorted(upstream.items())
    ]
    return found, sorted(chain, key=lambda one: (one["depth"], one["relay"]))


def _rollout(row: Mapping[str, Any], beat: RolloutStatus | None) -> dict[str, Any]:
    versions = {row["version"]} if beat is None else {v.number for v in beat.held}
    return {
        "name": row["rollout"],
        "kind": "rollout",
        "term": row["rollout_term"],
        "version": row["version"],
        "versions": sorted(versions),
        "verified": None if beat is None else beat.verified,
        "checked": row["checked"],
        "seconds": row["seconds"],
        "tensors": row["tensors"],
        "time_s": row["time_s"],
    }


def _relay(record: RelayStatus) -> dict[str, Any]:
    return {
        "name": record.relay,
        "kind": "relay",
        "term": record.term,
        "node": record.node,
        "versions": sorted(version.number for version in record.versions),
        "upstream": record.upstream,
        "leaving": not record.url,
        "time_s": record.time_s,
    }


def _depth(name: str, upstream: Mapping[str, str]) -> int:
    """Returns how many relays are between this one and the store, itself included."""
    depth = 1
    while (name := upstream.get(name, "")) in upstream and depth < len(upstream):
        depth += 1
    return depth
