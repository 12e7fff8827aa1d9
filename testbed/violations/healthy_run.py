"""A small healthy run, written by the product's own writers into a SQLite bus and a file store, and
a writer for further records: violations are planted in the form in which a faulty program would
write them.

Nine groups of two trajectories, group 2 of three: 0 to 3 are trained in steps 1 and 2, in step 2
group 4 is filtered, 7 dead, 8 expired at its deadline; 5 is open and has both its completions, 6 is
open and has none. 1.1 was resumed from a partial, 2.2 died, the reward of 3.1 is an annotation.
Versions 0 to 2 are believed, a checkpoint of step 2 is kept.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.folds import InvariantResult
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.storage.claim_check import ClaimCheck
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.checkpoints import write_checkpoint
from rollstream.storage.weights.manifest import Manifest, manifest_key
from rollstream.storage.weights.pointer import advance_pointer, take_pointer
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.bus import Bus
from rollstream.streams.codec import encode, record_hash
from rollstream.streams.connect import open_bus
from rollstream.streams.records import (
    Admitted,
    Annotation,
    Applied,
    Assignment,
    Configured,
    GroupClosed,
    Partial,
    Position,
    Prompt,
    Record,
    StepDone,
    Take,
    Trajectory,
    WeightsAnnounced,
)
from rollstream.streams.topics import catalogue
from rollstream.streams.values import (
    Address,
    AnnotationUsed,
    GroupMembers,
    Member,
    ReadTo,
    Sampling,
    Span,
    Version,
)
from rollstream.streams.writer import FencedWriter, publish

RUN = "audited"
MAX_LAG = 1
TOKENS = 6  # generated, of each trajectory
PROMPT = 3  # tokens of each
TRAINER = TrainerSettings(filter_equal_rewards=True, samples_per_group=2)
POLICY = AuditPolicy(
    MAX_LAG,
    keep_version=False,
    rule=training_rule(TRAINER, MAX_LAG, keep_version=False),
    checkpoint_every=2,
)
KEEP = replace(POLICY, keep_version=True, rule=training_rule(TRAINER, MAX_LAG, keep_version=True))
CONFIGURATION = {
    "run": RUN, "bus": "sqlite:bus", "store": "file:store", "sync": "normal",
    "dispatch": {"max_lag": MAX_LAG}, "rollouts": {"on_update": "in_flight"},
    "trainer": TRAINER.model_dump(mode="json"), "checkpoints": {"every": 2},
}  # fmt: skip
DEADLINE_S = 600.0
STEP_S = 10.0


@dataclass
class AuditedRun:
    """One term of prompt source, trainer and dispatch; `random` draws what a plant may choose."""

    folder: Path
    bus: Bus
    store: ObjectStore
    term: int
    random: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        self.ledger = FencedWriter(self.bus, "ledger", "trainer", self.term)
        self.weights = FencedWriter(self.bus, "weights", "trainer", self.term)
        self.admissions = FencedWriter(self.bus, "admissions", "dispatch", self.term)
        self.assignments = FencedWriter(self.bus, "assignments", "dispatch", self.term)
        self.prompts = FencedWriter(self.bus, "prompts", "prompts", self.term)
        take_pointer(self.store, RUN, self.term)
        for writer in (
            self.ledger, self.weights, self.admissions, self.assignments, self.prompts
        ):  # fmt: skip
            writer.open()

    def admit(self, *groups: int) -> None:
        """The prompt of each group, its admission, and the first assignment of each trajectory."""
        self.prompts.append([(str(group), prompt(group)) for group in groups])
        self.admissions.append([(str(group), admitted(group)) for group in groups])
        self.order(*(order(group, i) for group in groups for i in range(samples(group))))

    def order(self, *orders: Assignment) -> None:
        self.assignments.append([(one.trajectory, one) for one in orders])

    def gain(self, record: Partial) -> Address:
        return publish(self.bus, "partials", record.trajectory, record)

    def complete(self, record: Trajectory) -> Member:
        at = publish(self.bus, "trajectories", str(record.group), record)
        return Member(record.trajectory, at, record_hash(encode(record)))

    def note(self, record: Annotation) -> AnnotationUsed:
        at = publish(self.bus, "annotations", str(record.group), record)
        return AnnotationUsed(record.trajectory, record.name, at, record_hash(encode(record)))

    def record(self, *records: Record) -> None:
        self.ledger.append([("run", record) for record in records])

    def publish_version(self, number: int, parent: Manifest | None) -> Manifest:
        version = Version(number, self.term)
        tensors = {"w": torch.full((8, 8), float(number))}
        new = NewVersion(RUN, version, tensors, {"config.json": b"{}"}, 1 << 20, 1.0)
        manifest = publish_version(self.store, new, parent)
        advance_pointer(self.store, manifest)
        self.weights.append([(RUN, announced(manifest))])
        applied = Applied("rollout-0", 1, version, manifest.hash, "hashes", 1, 0.1, 1.0)
        publish(self.bus, "applied", "rollout-0", applied)
        return manifest

    def train(
        self,
        step: int,
        groups: dict[int, list[Member]],
        *,
        untrained: tuple[str, ...] = (),
        notes: tuple[AnnotationUsed, ...] = (),
        **fields: Any,
    ) -> None:
        """One take and its `StepDone`; `fields` overrides fields of the latter."""
        every = [m for named in groups.values() for m in named]
        members = tuple(m for m in every if m.trajectory not in untrained)
        begun = tuple(GroupMembers(group, tuple(named)) for group, named in groups.items())
        fields["counts"] = {"groups": len(groups)} | fields.get("counts", {})
        self.record(
            Take(step, 0, 0, members, begun, notes, self.read(), Version(step - 1, 1)),
            done(step, self.term, len(members), **fields),
        )

    def read(self) -> tuple[ReadTo, ...]:
        """A trainer that has read everything."""
        return tuple(
            ReadTo(topic, tuple(at for _, at in sorted(self.bus.end(topic).items())))
            for topic in ("trajectories", "annotations")
        )

    def keep(self, step: int) -> None:
        """A checkpoint after this step."""
        positions = {
            topic: {str(p): Position(at) for p, at in self.bus.end(topic).items()}
            for topic in ("trajectories", "annotations", "admissions")
        }
        ledger = Position(self.bus.end("ledger")[0])
        state = TrainerState(step, step, ledger, positions, (), {}, "configuration")
        tensors = {"masters.w": torch.full((8, 8), float(step))}
        write_checkpoint(self.store, step, self.term, tensors, state.encode())


def samples(group: int) -> int:
    return 3 if group == 2 else 2


def prompt(group: int) -> Prompt:
    return Prompt(group, "t", np.arange(PROMPT, dtype=np.uint32), samples(group), Sampling(), 0)


def admitted(group: int, deadline_s: float = DEADLINE_S) -> Admitted:
    names = tuple(f"{group}.{index}" for index in range(samples(group)))
    return Admitted(group, group // 2, names, deadline_s, Address(0, group + 1))


def order(group: int, index: int, attempt: int = 1, **changed: Any) -> Assignment:
    """Assigns to rollout-0, or as `changed` specifies."""
    values: dict[str, Any] = {
        "kind": "start", "trajectory": f"{group}.{index}", "group": group, "index": index,
        "attempt": attempt, "rollout": "rollout-0", "rollout_term": 1, "version": Version(0, 0),
        "task": "t", "tokens": np.arange(PROMPT, dtype=np.uint32), "sampling": Sampling(),
        "seed": 0, "wave": group // 2,
    } | changed  # fmt: skip
    return Assignment(**values)


def partial(record: Trajectory, start: int, end: int, previous: Address | None) -> Partial:
    """Tokens `[start, end)` of a completion, as rollout-0 had published them before."""
    first, last = start - PROMPT, end - PROMPT
    spans = tuple(
        Span(max(span.start, first), min(span.end, last), span.version)
        for span in record.spans
        if span.end > first and span.start < last
    )
    return Partial(
        record.trajectory, record.group, 1, "rollout-0", 1, previous, start,
        record.tokens[start:end], record.sources[:0], record.logprobs[first:last], spans,
    )  # fmt: skip


def completion(group: int, index: int, *versions: int, **changed: Any) -> Trajectory:
    """Its generated tokens in equal spans under these versions of term 1."""
    edges = np.linspace(0, TOKENS, len(versions) + 1).astype(int).tolist()
    values: dict[str, Any] = {
        "spans": tuple(
            Span(start, end, Version(number, 1))
            for start, end, number in zip(edges, edges[1:], versions, strict=False)
        ),
        "finish": "stop", "reward": float(index), "attempt": 1, "trajectory": f"{group}.{index}",
        "group": group, "index": index, "task": "t", "rollout": "rollout-0", "rollout_term": 1,
        "wave": group // 2,
    } | changed  # fmt: skip
    base: dict[str, Any] = {
        "tokens": np.arange(PROMPT + TOKENS, dtype=np.uint32),
        "sources": np.array([0] * PROMPT + [1] * TOKENS, np.uint8),
        "logprobs": np.full(TOKENS, -0.5, np.float32), "trainer_version": Version(0, 1),
        "started_s": 1.0, "finished_s": 2.0,
    }  # fmt: skip
    return Trajectory(**(base | values))


def done(step: int, term: int, trajectories: int, **fields: Any) -> StepDone:
    counts = {"trained": trajectories, "masked_tokens": 0}
    counts |= fields.pop("counts", {})
    tokens = float(fields.pop("tokens", TOKENS * trajectories - counts["masked_tokens"]))
    metrics = {"tokens_trained": tokens, "lag_consumed_max": 1.0, "seconds": STEP_S}
    metrics |= fields.pop("metrics", {})
    version = fields.pop("version", Version(step, term))
    return StepDone(step, version, f"{step:032d}", 1, metrics, counts, 1.0, **fields)


def announced(manifest: Manifest, manifest_hash: str | None = None) -> WeightsAnnounced:
    key = manifest_key(manifest.version)
    return WeightsAnnounced(
        RUN, manifest.version, key, manifest_hash or manifest.hash, manifest.kind, manifest.parent,
        manifest.bytes, 1.0,
    )  # fmt: skip


def open_run(folder: Path, term: int, seed: int = 0) -> AuditedRun:
    """Opens a new term of all roles."""
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    bus.create(catalogue(2))
    return AuditedRun(folder, bus, open_store(f"file:{folder / 'store'}"), term, Random(seed))


def make_run(folder: Path) -> Path:
    """The healthy run, and its `config.json`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGURATION))
    run = open_run(folder, 1)
    run.record(Configured("configuration", "revision", 0))
    manifest = run.publish_version(0, None)
    run.admit(*range(9))
    for step, first in ((1, 0), (2, 2)):
        if step == 2:
            close_some(run)
        groups = {group: complete_group(run, group, step - 1) for group in (first, first + 1)}
        counts = {"filtered": 1, "dead": 1, "expired": 1} if step == 2 else {}
        notes = (late_reward(run),) if step == 2 else ()
        run.train(step, groups, untrained=("2.2",), notes=notes, counts=counts)
        manifest = run.publish_version(step, manifest)
    run.keep(2)
    for index in (0, 1):
        run.complete(completion(5, index, 1, 2))
    run.complete(completion(5, 1, 2, attempt=2))  # too late: only counted
    run.bus.close()
    return folder


def complete_group(run: AuditedRun, group: int, version: int) -> list[Member]:
    """The completions of its rollout: group 2 has a dead one, 3.1 no reward yet."""
    members: list[Member] = []
    for index in range(samples(group)):
        record = completion(group, index, version)
        if (group, index) == (2, 2):
            record = completion(group, index, version, finish="dead", reason="no room")
        if (group, index) == (3, 1):
            record = completion(group, index, version, reward=None)
        if (group, index) == (1, 1):
            record = resumed(run)
        members.append(run.complete(record))
    return members


def resumed(run: AuditedRun) -> Trajectory:
    """1.1, from a chain of two partials, by another rollout."""
    record = completion(1, 1, 0, attempt=2, rollout="rollout-1")
    link = run.gain(partial(record, PROMPT, PROMPT + 2, None))
    link = run.gain(partial(record, PROMPT + 2, PROMPT + 3, link))
    run.order(order(1, 1, 2, kind="resume", rollout="rollout-1", partial=link))
    return record


def late_reward(run: AuditedRun) -> AnnotationUsed:
    return run.note(Annotation("3.1", 3, "reward", np.array([1.0], np.float32), "judge"))


def close_some(run: AuditedRun) -> None:
    """In step 2: equal rewards, no survivor, the deadline."""
    for index in (0, 1):
        run.complete(completion(4, index, 0, 1, reward=0.0))
        run.complete(completion(7, index, 0, finish="dead", reason="no room"))
    run.complete(completion(8, 0, 0))
    late = f"deadline of {DEADLINE_S:g} s passed, 1 of 2 finished; 1 of 2 lived: "
    run.record(
        GroupClosed(4, "filtered", "all rewards are 0", 2),
        GroupClosed(7, "dead", "0 of 2 lived: no room", 2),
        GroupClosed(8, "expired", late, 2),
    )


def audited(folder: Path, policy: AuditPolicy = POLICY) -> dict[int, InvariantResult]:
    """The audit of a folder, by invariant."""
    store = open_store(f"file:{folder / 'store'}")
    bus = ClaimCheck(open_bus(f"sqlite:{folder / 'bus'}"), store)
    try:
        return {t.number: t for t in Audit(bus, store, RUN, policy).check()}
    finally:
        bus.close()
