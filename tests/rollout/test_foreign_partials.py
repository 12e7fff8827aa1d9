"""A chain of partials is read forward, once, and no foreign record in `partials` ends the rollout
(invariants 3 and 12).
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.errors import DecodeError
from rollstream.producers.rollout import chain
from rollstream.producers.rollout.chain import ChainContent, ChainRequest, read_chains
from rollstream.streams.bus import AppendEntry
from rollstream.streams.records import Partial, Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, Drafts, Span, Version
from rollstream.streams.writer import publish
from testbed.memory import MemoryBus
from tests.rollout.test_giving_up import Scene, order, whole

V3 = Version(3, 1)


class Counts(MemoryBus):
    """A bus that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.create(catalogue(1))

    def read(self, topic, positions, **how):  # type: ignore[no-untyped-def]
        self.calls["read"] += 1
        return super().read(topic, positions, **how)


def link(trajectory: str, start: int, previous: Address | None, count: int = 2) -> Partial:
    """`count` tokens behind a prompt of 2."""
    first = start - 2
    tokens = np.full(count, 7, np.uint32)
    return Partial(
        trajectory, 3, 1, "a", 1, previous, start, tokens, np.empty(0, np.uint8),
        np.zeros(count, np.float32), (Span(first, first + count, V3),),
    )  # fmt: skip


def chained(bus: MemoryBus, trajectory: str, links: int) -> ChainRequest:
    """A chain of so many partials."""
    first = at = publish(bus, "partials", trajectory, link(trajectory, 2, None))
    for number in range(1, links):
        at = publish(bus, "partials", trajectory, link(trajectory, 2 + 2 * number, at))
    return ChainRequest(trajectory, at, first, start=2)


def test_many_chains_of_one_dead_rollout_are_one_pass():
    bus = Counts()
    wanted = [chained(bus, f"3.{n}", 64) for n in range(8)]
    found = read_chains(bus, wanted)
    assert [len(f.tokens) for f in found.values() if isinstance(f, ChainContent)] == [128] * 8
    assert bus.calls["read"] == 1


def test_a_chain_whose_assignment_names_no_first_partial_is_found_too():
    """As a dispatch of an earlier release writes it."""
    bus = Counts()
    one = chained(bus, "3.1", 5)
    found = read_chains(bus, [ChainRequest("3.1", one.newest)])["3.1"]
    assert isinstance(found, ChainContent)
    assert len(found.tokens) == 10


def after(at: Address) -> Partial:
    return link("3.1", 4, at)


BAD: dict[str, Callable[[Address], Partial]] = {
    "another partition": lambda at: after(Address(99, 0)),
    "beyond the end": lambda at: after(Address(0, 1 << 40)),
    "no integer of a store": lambda at: after(Address(0, 1 << 70)),
    "negative": lambda at: after(Address(0, -1)),
    "itself": lambda at: after(Address(0, at.offset + 1)),
    "another trajectory": lambda at: after(Address(0, 0)),
    "a gap": lambda at: link("3.1", 9, at),
    "spans that do not tile": lambda at: replace(after(at), spans=(Span(2, 9, V3),)),
    "spans that overlap": lambda at: replace(after(at), spans=(Span(0, 2, V3),)),
    "a version out of bounds": lambda at: replace(
        after(at), spans=(Span(2, 4, Version(1 << 70, 1)),)
    ),
    "too few log-probabilities": lambda at: replace(after(at), logprobs=np.zeros(1, np.float32)),
    "no number": lambda at: replace(after(at), logprobs=np.full(2, np.nan, np.float32)),
    "sources of a prompt": lambda at: replace(after(at), sources=np.zeros(2, np.uint8)),
    "drafts out of bounds": lambda at: replace(
        after(at), drafts=Drafts((-5, 1 << 70), 1, 1, 1, 1, 0.0)
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_link_ends_the_chain(what: str):
    bus = Counts()
    publish(bus, "partials", "9.9", link("9.9", 2, None))
    first = publish(bus, "partials", "3.1", link("3.1", 2, None))
    newest = publish(bus, "partials", "3.1", BAD[what](first))
    other = chained(bus, "4.0", 3)
    found = read_chains(bus, [ChainRequest("3.1", newest, first, start=2), other])
    assert isinstance(found["3.1"], DecodeError)
    assert isinstance(found["4.0"], ChainContent)
    assert bus.calls["read"] == 1


@pytest.mark.parametrize("at", [Address(7, 0), Address(0, 99), Address(0, 1 << 70), Address(-1, 0)])
def test_a_chain_that_is_not_in_the_log_is_broken(at: Address):
    assert isinstance(read_chains(Counts(), [ChainRequest("3.1", at, at)])["3.1"], DecodeError)


def test_a_cycle_of_empty_partials_ends():
    bus = Counts()
    empty = replace(link("3.1", 4, Address(0, 1), 0), spans=())
    for _ in range(3):
        newest = publish(bus, "partials", "3.1", empty)
    assert isinstance(read_chains(bus, [ChainRequest("3.1", newest)])["3.1"], DecodeError)  # pyright: ignore[reportPossiblyUnboundVariable]


def test_a_chain_that_truncation_cut_is_broken():
    bus = Counts()
    one = chained(bus, "3.1", 5)
    bus.truncate("partials", {0: 2})
    assert isinstance(read_chains(bus, [one])["3.1"], DecodeError)


def test_a_chain_is_no_longer_than_its_assignment_allows():
    bus = Counts()
    one = chained(bus, "3.1", 5)
    short = ChainRequest("3.1", one.newest, one.first, 2, tokens_max=9)
    assert isinstance(read_chains(bus, [short])["3.1"], DecodeError)


def test_a_flood_under_one_name_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chain, "LINKS_BYTES_MAX", 2000)
    bus = Counts()
    flooded, other = chained(bus, "3.1", 50), chained(bus, "4.0", 3)
    found = read_chains(bus, [flooded, other])
    assert isinstance(found["3.1"], DecodeError)
    assert isinstance(found["4.0"], ChainContent)


def test_a_broken_chain_starts_again_from_its_prompt_and_ends_no_rollout():
    scene = Scene()
    rollout = scene.rollout("b")
    scene.bus.append("partials", [AppendEntry(b"3.1", b"no record", 0)])
    looped = publish(scene.bus, "partials", "3.1", replace(after(Address(0, 1)), tokens=_none()))
    for attempt, at in enumerate((Address(0, 0), looped, Address(5, 5)), 2):
        ordered = order("b", kind="resume", attempt=attempt, partial=at, moves=1)
        scene.order(replace(ordered, trajectory=f"3.{attempt}"))
    scene.turn(rollout, 120)
    finished = [r.record for r in scene.records("trajectories", Trajectory)]
    assert {one.trajectory for one in finished} == {"3.2", "3.3", "3.4"}
    assert all(one.finish != "dead" for one in finished)


def test_a_chain_that_the_engine_refuses_starts_again_from_its_prompt():
    """Tokens outside of the vocabulary, or more than the context holds."""
    scene = Scene()
    rollout = scene.rollout("b")
    long = link("3.1", 2, None, count=70)
    at = publish(
        scene.bus, "partials", "3.1", replace(long, tokens=np.full(70, 1 << 31, np.uint32))
    )
    scene.order(replace(order("b", kind="resume", attempt=2, partial=at), first=at))
    scene.turn(rollout, 60)
    (finished,) = scene.records("trajectories", Trajectory)
    assert finished.record.finish != "dead"
    assert len(finished.record.tokens) < 64
    assert whole(scene)[:2] == [5, 6]


def _none() -> np.ndarray:
    return np.empty(0, np.uint32)
