"""Finished trajectories for scorers, and a scorer in a thread."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np

from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.scoring.scorer import AnnotationPlan, Scorer
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.character_tokenizer import BOS, EOS
from rollstream.producers.tasks.registry import load_task
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Annotation, Trajectory
from rollstream.streams.values import Span, Version
from rollstream.streams.writer import publish
from testbed.waiting import WAIT_S

ENCODE = load_task(TaskSettings()).tokenizer().encode


def finished(trajectory: str, answer: str = "=130", reference: str = "", **changed) -> Trajectory:
    """An answer to 633 mod 86; `changed` are other fields of the record."""
    prompt, reply = [BOS, *ENCODE("336%68")], [*ENCODE(answer), EOS]
    fields = {
        "trajectory": trajectory,
        "group": int(trajectory.partition(".")[0]),
        "index": 0,
        "attempt": 1,
        "task": "remainder",
        "rollout": "rollout-0",
        "rollout_term": 1,
        "tokens": np.array(prompt + reply, np.uint32),
        "sources": np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(reply)]),
        "logprobs": np.full(len(reply), -0.5, np.float32),
        "spans": (Span(0, len(reply), Version(0, 1)),),
        "finish": "stop",
        "reward": None,
        "trainer_version": Version(0, 1),
        "started_s": 0.0,
        "finished_s": 1.0,
        "reference": reference or '{"answer": "130"}',
    }
    return Trajectory(**fields | changed)


def post(bus: Bus, *records: Trajectory) -> None:
    for record in records:
        publish(bus, "trajectories", str(record.group), record)


def scorer(
    bus: Bus,
    function: str = "",
    names=("reward",),
    name: str = "scorer-0",
    clock: Callable[[], float] = time.monotonic,
) -> Scorer:
    """`clock` is that of its processes' bound, `WAIT_S`."""
    pool = RewardPool(TaskSettings(reward_timeout_s=WAIT_S), clock=clock, function=function)
    return Scorer(bus, pool, AnnotationPlan(tuple(names), not function, name), window=16)


@contextmanager
def running(one: Scorer) -> Generator[threading.Event]:
    """The scorer in a thread, stopped at the end."""
    stop = threading.Event()
    thread = threading.Thread(target=one.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def notes(bus: Bus) -> list[Annotation]:
    reader = TopicReader(bus, "annotations", from_begin(bus, "annotations"))
    records = [received.record for received in reader.read_to(bus.end("annotations"))]
    return [record for record in records if isinstance(record, Annotation)]


def is_caught_up(bus: Bus) -> bool:
    """Returns whether the group has committed all present records."""
    committed = bus.committed("scoring", "trajectories")
    end = bus.end("trajectories")
    return all(p in committed and committed[p].offset == at for p, at in end.items() if at)
