"""A prompt source that was away, or slow, until all it published was trained and truncated: it
publishes further prompts, and repeats none (invariant 11).
"""

import threading

import pytest

from rollstream.consumers.dispatch.inbox import DispatchInbox
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.producers import prompt_source
from rollstream.producers.prompt_source import PromptOrder, PromptSource
from rollstream.producers.tasks.base import TaskPrompt
from rollstream.streams.bus import Bus
from rollstream.streams.fence import truncate
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, Prompt
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, Sampling
from rollstream.streams.writer import FencedWriter
from testbed.memory import MemoryBus
from testbed.waiting import wait_for

AHEAD = 4


def published(bus: Bus) -> dict[int, Address]:
    reader = TopicReader(bus, "prompts", from_begin(bus, "prompts"))
    found = reader.read_to(bus.end("prompts"))
    return {one.record.group: one.address for one in found if isinstance(one.record, Prompt)}


def start_source(bus: Bus, term: int, stop: threading.Event) -> threading.Thread:
    order = PromptOrder("t", lambda seed, group: TaskPrompt((1, 2), ""), Sampling(), 2, seed=0)
    thread = threading.Thread(target=PromptSource(bus, order, term, AHEAD).run, args=(stop,))
    thread.start()
    return thread


def admit_all_and_truncate(bus: Bus) -> None:
    """What dispatch and trainer leave of groups that are all trained."""
    writers = {t: FencedWriter(bus, t, "dispatch", 1) for t in ("admissions", "assignments")}
    own = {topic: writer.open() for topic, writer in writers.items()}
    prompts = published(bus)
    writers["admissions"].append(
        [(str(g), Admitted(g, 0, (f"{g}.0", f"{g}.1"), 60.0, at)) for g, at in prompts.items()]
    )
    truncate(bus, "admissions", writers["admissions"].positions())
    state = DispatchState()
    state.next_group = max(prompts) + 1
    inbox = DispatchInbox(bus, state, lambda: 0.0)
    inbox.rebuild(own, {"admissions": writers["admissions"].positions()})
    inbox.read()
    truncate(bus, "prompts", inbox.positions()["prompts"])
    assert list(published(bus)) == [max(prompts)], "the newest prompt stays, and no other"


@pytest.mark.parametrize("is_away", [True, False])
def test_prompts_follow_those_that_were_truncated(
    is_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Away: its next term begins in the truncated log. Slow: it polls again only after the
    # truncation, of which it was not told.
    monkeypatch.setattr(prompt_source, "POLL_S", 2.0)
    bus, stop = MemoryBus(), threading.Event()
    bus.create(catalogue(2))
    thread = start_source(bus, 1, stop)
    wait_for(lambda: len(published(bus)) == AHEAD)
    if is_away:
        stop.set()
        thread.join()
        stop.clear()
    admit_all_and_truncate(bus)
    if is_away:
        thread = start_source(bus, 2, stop)
    wait_for(lambda: len(published(bus)) > 1)
    stop.set()
    thread.join()
    groups = list(published(bus))
    assert groups == list(range(AHEAD - 1, groups[-1] + 1))
    assert groups[-1] >= AHEAD + 1
