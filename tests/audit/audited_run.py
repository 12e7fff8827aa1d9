"""A small healthy run, written by the product's own writers into a SQLite bus and a file store, and
a hand to write more into it: what is planted is as a broken program would have written it.

Five groups of two trajectories: 0 to 3 are trained in steps 1 and 2, 4 is filtered in step 2; 5 is
open and has both its completions, 6 is open and has none. Versions 0 to 2 are believed.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from consumers.audit.audit import Audit
from consumers.audit.lag import Policy
from consumers.audit.tally import Tally
from storage.connect import open_store
from storage.manifest import Manifest, manifest_key
from storage.objects import ObjectStore
from storage.versions.pointer import believe, take_pointer
from storage.versions.publish import publish as publish_version
from streams.bus import Bus
from streams.codec import content_hash, encode
from streams.connect import open_bus
from streams.records import (
    Address,
    Admitted,
    Annotation,
    AnnotationUsed,
    Applied,
    GroupClosed,
    GroupMembers,
    Member,
    Span,
    StepDone,
    Take,
    Trajectory,
    Version,
    WeightsAnnounced,
)
from streams.topics import catalogue
from streams.writer import FencedWriter, publish

RUN = "audited"
MAX_LAG = 1
TOKENS = 6  # generated, of each trajectory
POLICY = Policy(MAX_LAG, keep_version=False)
CONFIGURATION = {
    "run": RUN, "bus": "sqlite:bus", "store": "file:store", "sync": "normal",
    "dispatch": {"max_lag": MAX_LAG}, "rollouts": {"on_update": "in_flight"},
}  # fmt: skip


@dataclass
class AuditedRun:
    """One term of trainer and dispatch, writing."""

    folder: Path
    bus: Bus
    store: ObjectStore
    term: int

    def __post_init__(self) -> None:
        self.ledger = FencedWriter(self.bus, "ledger", "trainer", self.term)
        self.weights = FencedWriter(self.bus, "weights", "trainer", self.term)
        self.admissions = FencedWriter(self.bus, "admissions", "dispatch", self.term)
        take_pointer(self.store, RUN, self.term)
        for writer in (self.ledger, self.weights, self.admissions):
            writer.open()

    def admit(self, *groups: int) -> None:
        self.admissions.append([(str(group), admitted(group)) for group in groups])

    def complete(self, record: Trajectory) -> Member:
        at = publish(self.bus, "trajectories", str(record.group), record)
        return Member(record.trajectory, at, content_hash(encode(record)))

    def note(self, record: Annotation) -> AnnotationUsed:
        at = publish(self.bus, "annotations", str(record.group), record)
        return AnnotationUsed(record.trajectory, record.name, at, content_hash(encode(record)))

    def say(self, *records: Take | StepDone | GroupClosed) -> None:
        self.ledger.append([("run", record) for record in records])

    def publish_version(self, number: int, parent: Manifest | None) -> Manifest:
        version = Version(number, self.term)
        tensors = {"w": torch.full((8, 8), float(number))}
        manifest = publish_version(
            self.store, RUN, version, tensors, {"config.json": b"{}"}, 1 << 20, parent, 1.0
        )
        believe(self.store, manifest)
        self.weights.append([(RUN, announced(manifest))])
        applied = Applied("rollout-0", 1, version, manifest.hash, "hashes", 1, 0.1, 1.0)
        publish(self.bus, "applied", "rollout-0", applied)
        return manifest

    def train(self, step: int, groups: dict[int, list[Member]], **said) -> None:
        """One take and its `StepDone`; `said` overrides what the latter says."""
        members = tuple(m for named in groups.values() for m in named)
        begun = tuple(GroupMembers(group, tuple(named)) for group, named in groups.items())
        self.say(Take(step, 0, 0, members, begun), done(step, self.term, len(members), **said))


def admitted(group: int) -> Admitted:
    return Admitted(group, group // 2, (f"{group}.0", f"{group}.1"), 600.0, Address(0, group))


def completion(group: int, index: int, *versions: int, **changed) -> Trajectory:
    """Its generated tokens in equal spans under these versions of term 1."""
    edges = np.linspace(0, TOKENS, len(versions) + 1).astype(int).tolist()
    values = {
        "spans": tuple(
            Span(start, end, Version(number, 1))
            for start, end, number in zip(edges, edges[1:], versions, strict=False)
        ),
        "finish": "stop", "reward": float(index), "attempt": 1,
    } | changed  # fmt: skip
    return Trajectory(
        trajectory=f"{group}.{index}", group=group, index=index, task="t", rollout="rollout-0",
        rollout_term=1, tokens=np.arange(3 + TOKENS, dtype=np.uint32),
        sources=np.array([0] * 3 + [1] * TOKENS, np.uint8),
        logprobs=np.full(TOKENS, -0.5, np.float32), trainer_version=Version(0, 1),
        started_s=1.0, finished_s=2.0, **values,
    )  # fmt: skip


def done(step: int, term: int, trajectories: int, **said) -> StepDone:
    counts = {"trained": trajectories, "groups": trajectories // 2, "masked_tokens": 0}
    counts |= said.pop("counts", {})
    tokens = float(said.pop("tokens", TOKENS * trajectories - counts["masked_tokens"]))
    metrics = {"tokens_trained": tokens, "lag_consumed_max": 1.0}
    version = said.pop("version", Version(step, term))
    return StepDone(step, version, f"{step:032d}", 1, metrics, counts, 1.0, **said)


def announced(manifest: Manifest, manifest_hash: str | None = None) -> WeightsAnnounced:
    key = manifest_key(manifest.version)
    return WeightsAnnounced(
        RUN, manifest.version, key, manifest_hash or manifest.hash, manifest.kind, manifest.parent,
        manifest.bytes, 1.0,
    )  # fmt: skip


def open_run(folder: Path, term: int) -> AuditedRun:
    """A new term of both roles on what is there."""
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    bus.create(catalogue(2))
    return AuditedRun(folder, bus, open_store(f"file:{folder / 'store'}"), term)


def make_run(folder: Path) -> Path:
    """The healthy run, and its `config.json`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGURATION))
    run = open_run(folder, 1)
    for topic, role in (("prompts", "prompts"), ("assignments", "dispatch")):
        FencedWriter(run.bus, topic, role, 1).open()
    manifest = run.publish_version(0, None)
    run.admit(*range(7))
    for step, first in ((1, 0), (2, 2)):
        if step == 2:
            for index in (0, 1):
                run.complete(completion(4, index, 0, 1))
            run.say(GroupClosed(4, "filtered", "all rewards are 0", 2))
        groups = {
            group: [run.complete(completion(group, index, step - 1)) for index in (0, 1)]
            for group in (first, first + 1)
        }
        counts = {"filtered": 1} if step == 2 else {}
        run.train(step, groups, counts=counts)
        manifest = run.publish_version(step, manifest)
    for index in (0, 1):
        run.complete(completion(5, index, 1, 2))
    run.complete(completion(5, 1, 2, attempt=2))  # too late: counted, no more
    run.bus.close()
    return folder


def audited(folder: Path, policy: Policy = POLICY) -> dict[int, Tally]:
    """The audit of a folder, by invariant."""
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    try:
        store = open_store(f"file:{folder / 'store'}")
        return {t.number: t for t in Audit(bus, store, RUN, policy).check()}
    finally:
        bus.close()
