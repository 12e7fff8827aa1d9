"""A small run whose every count is known, in a real folder: SQLite log, file store, metrics.

Three groups of two trajectories: 0 is trained in step 1, 1 in step 2 (which term 2 of the trainer
repeated), 2 (episodes of one turn) is filtered; 3 is open and has one dead completion. It also has
records that a view must not count: a second completion, a zombie's records, undecodable bytes, a
NaN from a scorer.
"""

import json
import threading
from pathlib import Path

import numpy as np

from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.settings import ArchiveSettings
from rollstream.producers.tasks.character_tokenizer import BOS, EOS, CharacterTokenizer
from rollstream.producers.tasks.remainder import CHARACTERS
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.records import (
    Admitted,
    Annotation,
    Applied,
    Assignment,
    Configured,
    GroupClosed,
    Partial,
    StepDone,
    Take,
    Trajectory,
)
from rollstream.streams.topics import catalogue
from rollstream.streams.values import (
    Address,
    Drafts,
    GroupMembers,
    Member,
    Sampling,
    Span,
    Turn,
    Version,
)
from rollstream.streams.writer import FencedWriter, publish

TOKENIZER = CharacterTokenizer(CHARACTERS)
RUN = "asked"
CONFIGURATION = {
    "run": RUN,
    "bus": "sqlite:bus",
    "store": "file:store",
    "sync": "normal",
    "model": {"path": None},
    "dispatch": {"max_lag": 1},
}
PROMPT, ANSWER = "118%83", ">531=531"  # 1 + 6 and 8 + 1 tokens
DRAFTS = Drafts((2, 4, 1, 2), 4, 8, 3, 2, 0.00003)  # two steps, then two passes; not of group 0
EVALUATION = {
    "step": 0, "seconds": 0.0, "accuracy_sampled": 0.25, "accuracy_greedy": 0.5,
    "length_median": 5.0, "length_p99": 9.0, "shares": {"full": 1.0}, "dead": 0,
}  # fmt: skip


def make_run(folder: Path) -> Path:
    """Writes the whole run into `folder`; nothing is archived yet."""
    (folder / "model").mkdir(parents=True)
    (folder / "store").mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGURATION))
    TOKENIZER.save(folder / "model")
    with MetricsFile(folder / "metrics" / "eval.jsonl") as lines:
        lines.append(EVALUATION)
    with (folder / "metrics" / "eval.jsonl").open("a") as file:
        file.write('{"step": 10, "sec')  # cut off by a kill
    bus = open_log(folder)
    bus.create(catalogue(2))
    publish_first(bus)
    publish_rest(bus)
    bus.close()
    return folder


def open_log(folder: Path) -> Bus:
    return open_bus(f"sqlite:{folder / 'bus'}", lambda: 1_700_000_100.0)


def archive(folder: Path) -> None:
    """Archives everything up to the present ends."""
    bus, stop = open_log(folder), threading.Event()
    stop.set()
    ArchiveService(bus, open_store(f"file:{folder / 'store'}"), RUN, ArchiveSettings()).run(stop)
    bus.close()


def publish_first(bus: Bus) -> None:
    """Groups 0 and 1, and step 1."""
    dispatch = FencedWriter(bus, "admissions", "dispatch", 1)
    trainer = FencedWriter(bus, "ledger", "trainer", 1)
    zombie = FencedWriter(bus, "ledger", "trainer", 1)
    dispatch.open()
    trainer.open()
    zombie.append([("run", GroupClosed(99, "dead", "never written", 1))])  # repeats number 0: void
    dispatch.append([(str(group), admitted(group)) for group in (0, 1)])
    publish(bus, "assignments", "0.0", order("start"), 0)
    publish(bus, "assignments", "0.0", order("resume"), 1)
    publish(bus, "partials", "0.0", partial())
    for index in (0, 1):
        publish(bus, "trajectories", "0", trajectory(0, index, ((0, 9, 0),), 1.0 - index))
    publish(bus, "trajectories", "0", trajectory(0, 0, ((0, 9, 0),), 0.25, attempt=2))  # too late
    take = Take(1, 0, 0, members(0), (GroupMembers(0, members(0)),))
    trainer.append([("run", Configured("c" * 16, "r" * 40, 0)), ("run", take), ("run", done(1, 1))])
    publish(
        bus,
        "applied",
        "rollout-0",
        Applied("rollout-0", 1, Version(1, 1), "00", "hashes", 4, 0.5, 3.0),
    )


def publish_rest(bus: Bus) -> None:
    """Steps 2 of both terms, group 2, the open group 3, and the records that do not count."""
    dispatch = FencedWriter(bus, "admissions", "dispatch", 2)
    dispatch.open()
    dispatch.append([(str(group), admitted(group)) for group in (2, 3)])
    spans = ((0, 2, 0), (2, 9, 1))
    for index in (0, 1):
        publish(bus, "trajectories", "1", trajectory(1, index, spans, None))
        publish(bus, "trajectories", "2", trajectory(2, index, ((0, 9, 1),), 1.0))
    publish(bus, "trajectories", "3", dead(3, 0))
    bus.append("trajectories", [AppendEntry(b"3", b"no record", 0)])
    for values in ([float("nan")], [2e6], [0.5], [1.0]):
        publish(bus, "annotations", "1", note("1.0", "reward", values))
    publish(bus, "annotations", "1", note("1.1", "reward", [0.75]))
    publish(bus, "annotations", "1", note("1.1", "length", [], "the scorer gave up"))
    first = FencedWriter(bus, "ledger", "trainer", 2)
    first.open()
    first.append([("run", Take(2, 0, 0, members(1), (GroupMembers(1, members(1)),)))])
    first.append([("run", done(2, 2)), ("run", GroupClosed(2, "filtered", "all rewards are 1", 2))])
    late = FencedWriter(bus, "ledger", "trainer", 1)
    late.append([("run", done(2, 1))])  # the zombie's step 2


def admitted(group: int) -> Admitted:
    return Admitted(group, group // 2, (f"{group}.0", f"{group}.1"), 600.0, Address(0, group))


def trajectory(
    group: int,
    index: int,
    spans: tuple[tuple[int, int, int], ...],
    reward: float | None,
    attempt: int = 1,
) -> Trajectory:
    tokens = [BOS, *TOKENIZER.encode(PROMPT), *TOKENIZER.encode(ANSWER), EOS]
    generated = len(ANSWER) + 1
    return Trajectory(
        trajectory=f"{group}.{index}",
        group=group,
        index=index,
        attempt=attempt,
        task="remainder",
        rollout=f"rollout-{index}",
        rollout_term=1,
        tokens=np.array(tokens, np.uint32),
        sources=np.repeat(np.array([0, 1], np.uint8), [len(tokens) - generated, generated]),
        logprobs=np.linspace(-3, -0.1, generated, dtype=np.float32),
        spans=tuple(Span(start, end, Version(number, 1)) for start, end, number in spans),
        finish="stop",
        reward=reward,
        trainer_version=Version(1, 1),
        started_s=1_700_000_000.0 + group,
        finished_s=1_700_000_002.5 + group,
        scores={"style/full": 1.0},
        moves=attempt - 1,
        drafts=DRAFTS if group else None,
        turns=(Turn("d", "h", 0, len(tokens) - generated, len(tokens), "stop", 0.5, 1.5),)
        if group == 2
        else (),
    )


def dead(group: int, index: int) -> Trajectory:
    none = np.zeros(0, np.float32)
    tokens = np.array([BOS], np.uint32)
    return Trajectory(
        f"{group}.{index}", group, index, 1, "remainder", "rollout-0", 1, tokens,
        np.zeros(1, np.uint8), none, (), "dead", None, Version(1, 1), 1.7e9, 1.7e9,
        reason="no room",
    )  # fmt: skip


def members(group: int) -> tuple[Member, ...]:
    offsets = {0: (0, 1), 1: (3, 5)}[group]
    found = enumerate(offsets)
    return tuple(Member(f"{group}.{index}", Address(1, offset), "00") for index, offset in found)


def done(step: int, term: int) -> StepDone:
    metrics = {"reward_mean": 0.5 * step, "accuracy": 0.5, "of_term": float(term)}
    return StepDone(
        step, Version(step, term), f"{term:02d}", 1, metrics, {"trained": 2}, 1.7e9 + step
    )


def note(trajectory: str, name: str, values: list[float], reason: str = "") -> Annotation:
    group = int(trajectory.partition(".")[0])
    return Annotation(trajectory, group, name, np.array(values, np.float32), "judge", reason)


def order(kind: str) -> Assignment:
    attempt = 1 if kind == "start" else 2
    at = None if kind == "start" else Address(0, 0)
    tokens = np.array([BOS], np.uint32)
    return Assignment(
        kind, "0.0", 0, 0, attempt, "rollout-0", 1, Version(0, 1), "remainder", tokens, Sampling(),  # pyright: ignore[reportArgumentType]
        0, partial=at,
    )  # fmt: skip


def partial() -> Partial:
    tokens = np.array(TOKENIZER.encode(ANSWER)[:3], np.uint32)
    return Partial(
        "0.0", 0, 1, "rollout-0", 1, None, 7, tokens, np.ones(3, np.uint8),
        np.full(3, -0.5, np.float32), (Span(0, 3, Version(0, 1)),),
    )  # fmt: skip
