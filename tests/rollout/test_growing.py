"""One trajectory while it runs: spans tile the generated tokens (invariant 3), partials chain, the
record is complete.
"""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from rollstream.errors import DecodeError
from rollstream.producers.engines.base import Emission
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.streams.records import ENVIRONMENT, GENERATED, PROMPT, Assignment
from rollstream.streams.token_arrays import arrays_of
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, Drafts, Sampling, Version, accepted_mask
from rollstream.streams.writer import publish
from testbed.memory import MemoryBus
from tests.rollout.chains import read_chain

ORDER = Assignment(
    kind="start",
    trajectory="3.1",
    group=3,
    index=1,
    attempt=1,
    rollout="a",
    rollout_term=1,
    version=Version(0, 0),
    task="remainder",
    tokens=np.array([5, 6, 7], np.uint32),
    sampling=Sampling(),
    seed=0,
)

chunks = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=12)


def emission(count: int, version: int) -> Emission:
    tokens = np.arange(count, dtype=np.uint32)
    return Emission("3.1", tokens, -np.ones(count, np.float32), Version(version, 1), None)


def grown(parts: list[tuple[int, int]]) -> RunningTrajectory:
    running = RunningTrajectory.start(ORDER, None, now_s=0.0)
    for count, version in parts:
        running.extend(emission(count, version))
    return running


@given(parts=chunks)
def test_spans_tile_the_generated_tokens_and_neighbours_differ(parts: list[tuple[int, int]]):
    spans = grown(parts).spans
    edges = [0, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1]
    assert edges[-1] == sum(count for count, _ in parts)
    assert all(a.version != b.version for a, b in pairwise(spans))


@given(
    parts=chunks, cuts=st.sets(st.integers(0, 11)), environment_after=st.sets(st.integers(0, 11))
)
def test_a_chain_of_partials_has_the_generated_tokens_and_those_of_the_environment(
    parts: list[tuple[int, int]], cuts: set[int], environment_after: set[int]
):
    bus = MemoryBus()
    bus.create(catalogue(2))
    running = RunningTrajectory.start(ORDER, None, now_s=0.0)
    for index, (count, version) in enumerate(parts):
        running.extend(emission(count, version))
        if index in environment_after:
            running.extend_environment(np.array([9, 8], np.uint32), str(index))
        if index in cuts or index == len(parts) - 1:
            running.partial_published(
                publish(bus, "partials", "3.1", running.take_partial("a", 1, 1.0))
            )
    assert running.partial is not None
    gained = read_chain(bus, running.partial, "3.1")
    again = RunningTrajectory.start(replace(ORDER, partial=running.partial), gained, now_s=2.0)
    for mine, theirs in zip(again.content(), running.content(), strict=True):
        assert (mine == theirs).all()
    assert again.spans == running.spans
    assert again.generated == running.generated


def with_rows(count: int, number: int, version: int = 0) -> Emission:
    """Every second engine writes the array `x`, with a row of the token before too."""
    if number % 2:
        return emission(count, version)
    rows = np.arange(100 * number, 100 * number + count + 1, dtype=np.int32)
    return dataclasses.replace(emission(count, version), arrays={"x": rows})


@given(parts=chunks, cuts=st.sets(st.integers(0, 11)), moves=st.sets(st.integers(0, 11)))
def test_a_chain_of_partials_keeps_each_row_of_its_arrays(
    parts: list[tuple[int, int]], cuts: set[int], moves: set[int]
):
    """Over resumes, also of a turn whose newest token is withheld and generated again."""
    bus = MemoryBus()
    bus.create(catalogue(2))
    whole = RunningTrajectory.start(ORDER, None, now_s=0.0)
    moved = RunningTrajectory.start(ORDER, None, now_s=0.0)
    for index, (count, version) in enumerate(parts):
        for running in (whole, moved):
            running.extend(with_rows(count, index, version))
        if index in cuts | moves:
            record = moved.take_partial("a", 1, 1.0)
            moved.partial_published(publish(bus, "partials", "3.1", record))
        if index in moves:
            assert moved.partial is not None
            gained = read_chain(bus, moved.partial, "3.1")
            order = replace(ORDER, partial=moved.partial)
            moved = RunningTrajectory.start(order, gained, now_s=2.0)
        for running in (whole, moved):
            running.extend_environment(np.array([9], np.uint32), str(index))
    one, other = (
        arrays_of(running.to_record(1, "stop", 5.0, Version(2, 1), 1.0)).get("x")
        for running in (whole, moved)
    )
    assert one is not None
    assert other is not None
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.values.tolist() == other.values.tolist()
    assert len(one.tokens) == sum(n + 1 for n, _ in parts[::2])


def test_a_withheld_token_has_its_row_in_no_partial_before_its_turns_outcome():
    bus = MemoryBus()
    bus.create(catalogue(1))
    running = grown([])
    running.extend(with_rows(3, 0))
    running.end_turn()
    record = running.take_partial("a", 1, 1.0)
    array = arrays_of(record).get("x")
    assert array is not None
    assert array.tokens.tolist() == [2, 3, 4]
    at = publish(bus, "partials", "3.1", record)
    resumed = RunningTrajectory.start(
        replace(ORDER, partial=at), read_chain(bus, at, "3.1"), now_s=2.0
    )
    resumed.extend(with_rows(1, 2))
    array = arrays_of(resumed.to_record(1, "stop", 5.0, Version(2, 1), 1.0)).get("x")
    assert array is not None
    assert dict(zip(array.tokens.tolist(), array.values.tolist(), strict=True)) == {
        2: 0, 3: 1, 4: 2, 5: 201,
    }  # fmt: skip


def test_rows_of_a_chain_that_come_twice_make_it_unusable():
    bus = MemoryBus()
    bus.create(catalogue(1))
    running = grown([])
    running.extend(with_rows(2, 0))
    first = running.take_partial("a", 1, 1.0)
    running.partial_published(publish(bus, "partials", "3.1", first))
    running.extend(emission(2, 0))
    second = running.take_partial("a", 1, 1.0)
    twice = replace(second, arrays=first.arrays, array_bytes=first.array_bytes)
    with pytest.raises(DecodeError, match="two rows of token 2"):
        read_chain(bus, publish(bus, "partials", "3.1", twice), "3.1")


def test_a_zombies_partials_between_are_not_mixed_in():
    """Each partial names its predecessor, so two attempts never mix."""
    bus = MemoryBus()
    bus.create(catalogue(1))
    first, second = grown([(2, 0)]), grown([(2, 0)])
    first.partial_published(publish(bus, "partials", "3.1", first.take_partial("a", 1, 0.0)))
    second.partial_published(publish(bus, "partials", "3.1", second.take_partial("b", 1, 0.0)))
    first.extend(emission(3, 1))
    first.partial_published(publish(bus, "partials", "3.1", first.take_partial("a", 1, 0.0)))
    gained = read_chain(bus, first.partial, "3.1")  # pyright: ignore[reportArgumentType]
    assert gained.tokens.tolist() == [0, 1, 0, 1, 2]
    assert [span.version.number for span in gained.spans] == [0, 1]


def test_a_chain_that_names_another_trajectory_is_refused():
    bus = MemoryBus()
    bus.create(catalogue(1))
    running = grown([(2, 0)])
    at = publish(bus, "partials", "3.1", running.take_partial("a", 1, 0.0))
    with pytest.raises(DecodeError, match=r"9\.9"):
        read_chain(bus, at, "9.9")


def test_the_finished_record_holds_prompt_generated_and_environment_tokens():
    running = grown([(2, 0)])
    running.extend_environment(np.array([9], np.uint32), '{"turn": 1}')
    running.extend(emission(1, 1))
    record = running.to_record(1, "stop", 5.0, Version(2, 1), reward=1.0)
    assert record.sources.tolist() == [PROMPT] * 3 + [GENERATED] * 2 + [ENVIRONMENT, GENERATED]
    assert len(record.logprobs) == 3
    assert [(s.start, s.end) for s in record.spans] == [(0, 2), (2, 3)]
    assert (record.group, record.index, record.attempt) == (3, 1, 1)


def test_nothing_is_published_twice_in_partials():
    running = grown([(4, 0)])
    first = running.take_partial("a", 1, 0.0)
    running.partial_published(Address(0, 0))
    running.extend(emission(3, 0))
    second = running.take_partial("a", 1, 0.0)
    assert (first.start, len(first.tokens)) == (3, 4)
    assert (second.start, len(second.tokens)) == (7, 3)
    assert [(s.start, s.end) for s in second.spans] == [(4, 7)]


@given(parts=chunks, cuts=st.sets(st.integers(0, 11)), guessed=st.sets(st.integers(0, 11)))
def test_a_trajectory_that_moves_keeps_which_of_its_tokens_were_drafted(
    parts: list[tuple[int, int]], cuts: set[int], guessed: set[int]
):
    """Whether or not the engines before and after report drafts; without drafts no record has the
    field.
    """
    bus = MemoryBus()
    bus.create(catalogue(1))
    running = RunningTrajectory.start(ORDER, None, now_s=0.0)
    for index, (count, version) in enumerate(parts):
        drafts = Drafts((1, count - 1), 1, count, 2, 1, 0.5) if index in guessed else None
        running.extend(dataclasses.replace(emission(count, version), drafts=drafts))
        if index in cuts:
            at = publish(bus, "partials", "3.1", running.take_partial("a", 1, 1.0, last=True))
            gained = read_chain(bus, at, "3.1")
            running = RunningTrajectory.start(replace(ORDER, partial=at), gained, now_s=2.0)
    record = running.to_record(1, "stop", 5.0, Version(9, 1))
    known = [index for index in guessed if index < len(parts)]
    assert (record.drafts is None) == (not known)
    wanted = [index in guessed and at > 0 for index, (n, _) in enumerate(parts) for at in range(n)]
    assert accepted_mask(record.drafts, len(record.logprobs)).tolist() == wanted
    if record.drafts is not None:
        assert record.drafts.guessed == sum(parts[index][0] for index in known)
        assert record.drafts.steps == sum(
            1 if i in guessed else n for i, (n, _) in enumerate(parts)
        )
        assert record.drafts.lookup_s == 0.5 * len(known)


@given(parts=chunks, drafts=st.booleans())
def test_a_turn_that_awaits_its_outcome_keeps_its_last_token_out_of_partials(
    parts: list[tuple[int, int]], drafts: bool
) -> None:
    """A resume would generate past the turn's end with it. Afterwards the next partial has it."""
    running = RunningTrajectory.start(ORDER, None, now_s=0.0)
    for count, version in parts:
        stats = Drafts((count,), 1, count, 1, 1, 0.0) if drafts else None
        running.extend(dataclasses.replace(emission(count, version), drafts=stats))
    running.end_turn()
    total = running.generated
    first = running.take_partial("a", 1, 1.0) if running.has_unpublished() else None
    gained = 0 if first is None else len(first.tokens)
    assert gained == total - 1
    if first is not None:
        assert (len(first.logprobs), first.spans[-1].end) == (gained, gained)
        assert first.drafts is None or sum(first.drafts.runs) == gained
        running.partial_published(Address(0, 0))
    assert not running.has_unpublished()
    running.extend_environment(np.array([9], np.uint32), "on")
    then = running.take_partial("a", 1, 2.0)
    assert then.sources.tolist() == [GENERATED, ENVIRONMENT]
    assert (then.start, len(then.logprobs), then.environment) == (3 + gained, 1, "on")
    assert then.spans[0].start == gained
    assert then.drafts is None or sum(then.drafts.runs) == 1
