"""A rollout fills its history from log and archive, and follows the log."""

from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.producers.drafts.feed import HistoryFeed
from rollstream.producers.drafts.history import AnswerHistory, prompt_key
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.records import GENERATED, PROMPT, Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Span, Version
from rollstream.streams.writer import publish_all


def answer(group: int, generated: list[int], finish: str = "stop") -> Trajectory:
    tokens = np.array([1, 2, group, *generated], np.uint32)
    return Trajectory(
        trajectory=f"g{group}-{len(generated)}",
        group=group,
        index=0,
        attempt=1,
        task="t",
        rollout="other",
        rollout_term=1,
        tokens=tokens,
        sources=np.array([PROMPT] * 3 + [GENERATED] * len(generated), np.uint8),
        logprobs=np.zeros(len(generated), np.float32),
        spans=(Span(0, len(generated), Version(0, 1)),),
        finish=finish,  # pyright: ignore[reportArgumentType]
        reward=1.0,
        trainer_version=Version(0, 1),
        started_s=0.0,
        finished_s=1.0,
    )


def publish(bus: Bus, *records: Trajectory) -> None:
    publish_all(bus, "trajectories", [(str(record.group), record) for record in records])


def guessed(history: AnswerHistory, group: int, newest: list[int]) -> list[int]:
    key = prompt_key(np.array([1, 2, group], np.uint32), np.full(3, PROMPT, np.uint8))
    return list(history.draft(key, newest, 8).tokens)


@pytest.fixture
def bus(tmp_path: Path):
    bus = open_bus(f"sqlite:{tmp_path / 'bus'}")
    bus.create(catalogue())
    yield bus
    bus.close()


def test_answers_enter_the_history_from_the_start_and_as_they_come(bus: Bus) -> None:
    publish(bus, answer(7, [4, 5, 6, 7, 8]))
    remembering = HistoryFeed(bus, bus, AnswerHistory(4096))
    remembering.poll()
    assert guessed(remembering.history, 7, [1, 2, 7]) == [4, 5, 6, 7, 8]
    publish(bus, answer(8, [9, 9, 9]), answer(9, [3, 3, 3], "dead"))
    remembering.poll()
    assert guessed(remembering.history, 8, [1, 2, 8]) == [9, 9, 9]
    assert guessed(remembering.history, 9, [1, 2, 9]) == []  # a failure is no answer
    assert remembering.records == 2


def test_much_is_taken_in_bit_by_bit(bus: Bus) -> None:
    publish(bus, *[answer(group, [4, 5, 6, 7]) for group in range(100)])
    remembering = HistoryFeed(bus, bus, AnswerHistory(1 << 16))
    remembering.poll()
    assert 0 < remembering.records < 100
    for _ in range(9):
        remembering.poll()
    assert remembering.records == 100
    assert guessed(remembering.history, 99, [1, 2, 99]) == [4, 5, 6, 7]


def test_what_the_log_forgot_is_read_in_the_archive(bus: Bus, tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path / 'store'}", "normal")
    publish(bus, *[answer(group, [4, 5, 6, group]) for group in range(20)])
    archive = TopicArchive(bus, store, "r", "trajectories", ArchiveSettings())
    archive.start()
    archive.advance()
    archive.finish()
    bus.truncate("trajectories", bus.end("trajectories"))
    publish(bus, answer(30, [8, 8, 8]))
    remembering = HistoryFeed(bus, LogView(bus, store, "r"), AnswerHistory(4096))
    for _ in range(20):
        remembering.poll()
    assert remembering.records == 21
    assert guessed(remembering.history, 13, [1, 2, 13]) == [4, 5, 6, 13]
    assert guessed(remembering.history, 30, [1, 2, 30]) == [8, 8, 8]


def test_a_position_that_is_gone_is_passed_over(bus: Bus) -> None:
    publish(bus, *[answer(group, [4, 5, 6]) for group in range(10)])
    remembering = HistoryFeed(bus, bus, AnswerHistory(4096))
    bus.truncate("trajectories", bus.end("trajectories"))
    publish(bus, answer(11, [8, 8, 8]))
    for _ in range(3):
        remembering.poll()
    assert guessed(remembering.history, 11, [1, 2, 11]) == [8, 8, 8]
