"""Answers `weights`: the policy's stored versions, their holders, the chain of relays, and the
newest version of each named weight stream.
"""

import threading
import time
from collections.abc import Mapping
from itertools import groupby, islice
from operator import itemgetter
from statistics import fmean
from typing import Any

from rollstream.errors import CorruptObject, ObjectMissing, RollstreamError
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.query.locate import RunLocation
from rollstream.look.query.looking import open_run_store
from rollstream.look.report.chart import Chart, Series, draw_chart
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.manifest import Manifest, read_manifest
from rollstream.storage.weights.named_streams import STREAMS_MAX, WeightStream, named_streams
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.storage.weights.retention import listed_versions, stored_versions
from rollstream.streams.records import RelayStatus, RolloutStatus, WeightsAnnounced
from rollstream.streams.values import Version

VERSIONS_MAX = 512
APPLIED_MAX = 2000
CURVES_MAX = 8  # rollouts in the chart of delays
DELAYS = f"""
SELECT rollout, s.version, s.time_s - steps.time_s AS behind
FROM (SELECT * FROM served ORDER BY time_s DESC LIMIT {APPLIED_MAX}) s
JOIN steps ON steps.version = s.version ORDER BY rollout, s.version
"""
# A listing of the store is repeated no sooner.
LISTED_S = 5.0


class StoredWeights:
    """Reads the versions in one run's store."""

    def __init__(self, location: RunLocation) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._store: ObjectStore | None = None
        self._manifests: dict[Version, Manifest] = {}
        self._listed_s = float("-inf")
        self._lines: list[dict[str, Any]] = []
        self.latest: int | None = None
        self.streams: list[dict[str, Any]] = []

    def lines(self) -> list[dict[str, Any]]:
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
        streams = named_streams(store)[:STREAMS_MAX]
        self.streams = [_stream_line(store, stream) for stream in streams]
        lines: list[dict[str, Any]] = []
        newest = sorted(stored_versions(store), key=lambda s: s.version, reverse=True)
        for stored in newest[:VERSIONS_MAX]:
            manifest = self._manifest(store, stored.version)
            lines.append(_line(stored.version, manifest))
        return lines

    def _manifest(self, store: ObjectStore, version: Version) -> Manifest | None:
        # Manifests never change and are read once.
        if version not in self._manifests:
            try:
                self._manifests[version] = read_manifest(store, version)
            except (ObjectMissing, CorruptObject):
                return None
            if len(self._manifests) > VERSIONS_MAX:
                self._manifests.pop(min(self._manifests))
        return self._manifests[version]


def show_weights(run: ExploredRun, stored: StoredWeights) -> dict[str, Any]:
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
        "streams": stored.streams,
        "versions": versions,
        "holders": holders,
        "relays": relays,
        "delays": _delays(run),
        "applied": [list(row.values()) for row in reversed(applied)],
        "note": note or ("" if versions else "the store holds no weights (any more)"),
    }


def _delays(run: ExploredRun) -> dict[str, Any]:
    """Returns the seconds from the end of the step that made a version to each rollout that served
    it: a chart of some rollouts, and their means.
    """
    rows = run.index.rows(DELAYS)
    by_rollout = {
        name: [(float(row["version"]), row["behind"]) for row in of_rollout]
        for name, of_rollout in groupby(rows, itemgetter("rollout"))
    }
    series = tuple(
        Series(name, points, colour)
        for colour, (name, points) in enumerate(islice(by_rollout.items(), CURVES_MAX), start=1)
    )
    chart = Chart("Seconds behind, by version", series, form=".2f", along="version")
    delays = {name: [behind for _, behind in points] for name, points in by_rollout.items()}
    return {
        "chart": [draw_chart(chart)] if series else [],
        "rollouts": [
            {"rollout": name, "versions": len(own), "mean": fmean(own), "worst": max(own)}
            for name, own in delays.items()
        ],
    }


def _stream_line(store: ObjectStore, stream: WeightStream) -> dict[str, Any]:
    part = stream.part(store)
    try:
        pointer = believed_pointer(part)
    except CorruptObject:  # of this stream alone; `audit` names it
        pointer = None
    latest = None if pointer is None or pointer.version is None else pointer.version.number
    return {"name": stream.name, "latest": latest, "versions": len(listed_versions(part))}


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
        "changed": None if delta is None else sum(t.changed for t in delta.tensors.values()),
        "files": len(manifest.weights.files) + (0 if delta is None else len(delta.files)),
        "tensors": len(manifest.weights.tensors),
        "created_s": manifest.created_s,
        "hash": manifest.hash,
    }


def _announced(run: ExploredRun) -> Mapping[str, float]:
    times_s: dict[str, float] = {}
    for message in run.records.newest("weights").values():
        if isinstance(message.record, WeightsAnnounced):
            times_s[str(message.record.version)] = message.record.time_s
    return times_s


def _holders(run: ExploredRun) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    served = run.index.rows(
        "SELECT * FROM served QUALIFY row_number() OVER "
        "(PARTITION BY rollout ORDER BY rollout_term DESC, time_s DESC) = 1 ORDER BY rollout"
    )
    rollouts: dict[str, RolloutStatus] = {}
    relays: dict[str, RelayStatus] = {}
    for message in run.records.newest("status").values():
        record = message.record
        if isinstance(record, RolloutStatus):
            beat = rollouts.get(record.rollout)
            if beat is None or (beat.term, beat.time_s) < (record.term, record.time_s):
                rollouts[record.rollout] = record
        elif isinstance(record, RelayStatus):
            # The newest heartbeat of a rollout or relay counts.
            before = relays.get(record.relay)
            if before is None or before.term <= record.term:
                relays[record.relay] = record
    holders = [_rollout(row, rollouts.get(row["rollout"])) for row in served]
    holders += [_relay(relay) for relay in relays.values()]
    upstream = {relay.relay: relay.upstream.partition("/")[0] for relay in relays.values()}
    chain = [
        {"relay": name, "upstream": above, "depth": _depth(name, upstream)}
        for name, above in sorted(upstream.items())
    ]
    return holders, sorted(chain, key=lambda link: (link["depth"], link["relay"]))


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
    depth = 1
    while (name := upstream.get(name, "")) in upstream and depth < len(upstream):
        depth += 1
    return depth
