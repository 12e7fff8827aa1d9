"""Records other than answers: late rewards, and sequences that run on other rollouts."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from rollstream.producers.drafts import feed
from rollstream.producers.drafts.feed import IDLE_POLL_FACTOR, DraftFeed, HistoryFeed
from rollstream.producers.drafts.history import AnswerHistory
from rollstream.producers.drafts.node import NodeHistory
from rollstream.producers.engines.base import DraftStats
from rollstream.streams.bus import Bus
from tests.drafts.drafts_log import (
    answer,
    append_records,
    ask,
    asked,
    guessed,
    log_in,
    partial,
    reward,
)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    bus = log_in(tmp_path)
    yield bus
    bus.close()


def remembering(bus: Bus) -> HistoryFeed:
    return HistoryFeed(bus, bus, AnswerHistory(4096))


def test_a_late_reward_decides_between_siblings(bus: Bus) -> None:
    memory = remembering(bus)
    append_records(bus, answer(7, [4, 5, 6], "a", None), answer(7, [8, 9, 9], "b", None))
    memory.poll()
    assert guessed(memory.history.view, 7, asked(7)) == [8, 9, 9]
    append_records(bus, reward(7, "a", [1.0]), reward(7, "b", [0.0]))
    memory.poll()
    assert guessed(memory.history.view, 7, asked(7)) == [4, 5, 6]
    append_records(bus, reward(7, "b", [5.0]))  # the first one of a name counts
    memory.poll()
    assert guessed(memory.history.view, 7, asked(7)) == [4, 5, 6]


def test_a_reward_that_is_read_before_its_answer_counts(bus: Bus) -> None:
    memory = remembering(bus)
    append_records(bus, reward(7, "a", [3.0]), reward(7, "a", [-3.0]))
    memory.poll()
    append_records(bus, answer(7, [4, 5, 6], "a", None), answer(7, [8, 9, 9], "b", 0.5))
    memory.poll()
    assert guessed(memory.history.view, 7, asked(7)) == [4, 5, 6]


def test_a_reward_that_will_never_come_changes_nothing(bus: Bus) -> None:
    memory = remembering(bus)
    append_records(
        bus, answer(7, [4, 5, 6], "a", None), reward(7, "a", []), reward(7, "a", [float("nan")])
    )
    memory.poll()
    memory.poll()
    append_records(bus, answer(7, [8, 9, 9], "b", -1.0))
    memory.poll()
    assert guessed(memory.history.view, 7, asked(7)) == [4, 5, 6]


def test_partials_are_drafted_from_across_their_seams(bus: Bus) -> None:
    ask(bus, 8)
    memory = remembering(bus)
    append_records(bus, partial(7, 3, [4, 5], "a"), partial(7, 5, [6, 7, 8], "a"))
    memory.poll()
    assert guessed(memory.history.view, 7, asked(7)) == [4, 5]
    assert guessed(memory.history.view, 7, [7, 4, 5]) == [6, 7, 8]
    assert guessed(memory.history.view, 6, [7, 4, 5]) == []  # another prompt's


def test_a_partial_whose_beginning_was_missed_goes_as_far_as_it_goes(bus: Bus) -> None:
    ask(bus, 8)
    memory = remembering(bus)
    append_records(bus, partial(7, 30, [4, 5, 6, 7], "a"), partial(900, 3, [4, 5, 6, 7], "b"))
    memory.poll()
    assert guessed(memory.history.view, 7, [4, 5, 6]) == [7]
    append_records(bus, partial(7, 3, [8, 8, 8, 9], "a"))  # another attempt, from the prompt
    memory.poll()
    assert guessed(memory.history.view, 7, asked(7)) == [8, 8, 8, 9]


def test_what_is_finished_takes_the_place_of_what_ran(bus: Bus) -> None:
    ask(bus, 8)
    memory = remembering(bus)
    append_records(bus, partial(7, 3, [4, 5, 6], "a"))
    memory.poll()
    append_records(bus, answer(7, [4, 5, 6, 7, 8], "a", -1.0))
    memory.poll()
    assert guessed(memory.history.view, 7, asked(7)) == [4, 5, 6, 7, 8]


def test_partials_that_come_faster_than_they_are_read_are_passed_over(bus: Bus) -> None:
    """Their partials are out of date by then."""
    ask(bus, 8)
    memory = remembering(bus)
    many = 2 * feed.BEHIND_MAX
    append_records(bus, *[partial(7, 3 + i, [5], f"t{i % 50}") for i in range(many)])
    memory.poll()
    append_records(bus, partial(6, 3, [4, 5, 6], "new"))
    memory.poll()
    assert guessed(memory.history.view, 6, asked(6)) == [4, 5, 6]


def test_the_writer_of_the_history_reads_and_the_others_do_not(tmp_path: Path, bus: Bus) -> None:
    first, second = (
        DraftFeed(bus, lambda: bus, NodeHistory(tmp_path / "node", 4096)) for _ in range(2)
    )
    append_records(bus, answer(7, [4, 5, 6]))
    for draft_feed in (first, second):
        draft_feed.poll()
    assert [reader.topic for reader in first.readers()] == [
        "trajectories", "annotations", "prompts", "partials",
    ]  # fmt: skip
    assert second.readers() == []
    assert guessed(second.node.view(), 7, asked(7)) == [4, 5, 6]
    first.close(DraftStats())
    append_records(bus, answer(6, [9, 9, 9]))
    for _ in range(3):
        second.poll()
    assert guessed(second.node.view(), 7, asked(7)) == [4, 5, 6]
    assert guessed(second.node.view(), 6, asked(6)) == [9, 9, 9]
    second.close(DraftStats())
    assert not (tmp_path / "node").exists()


def test_an_engine_that_drafts_nothing_spends_little_on_remembering(
    tmp_path: Path, bus: Bus
) -> None:
    """By this clock a look-up takes as long as asking for a file that does not exist."""
    node = NodeHistory(tmp_path / "node", 4096)
    ticks = count()
    draft_feed = DraftFeed(bus, lambda: bus, node, clock=lambda: next(ticks) / 1024)
    draft_feed.poll(drafts=False)
    append_records(bus, answer(7, [4, 5, 6]))
    for _ in range(IDLE_POLL_FACTOR - 1):
        draft_feed.poll(drafts=False)
    assert guessed(node.view(), 7, asked(7)) == []
    draft_feed.poll(drafts=False)
    assert guessed(node.view(), 7, asked(7)) == [4, 5, 6]
    append_records(bus, answer(6, [9, 9, 9]))
    draft_feed.poll(drafts=True)
    assert guessed(node.view(), 6, asked(6)) == [9, 9, 9]
    draft_feed.close(DraftStats())
