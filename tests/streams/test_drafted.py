"""The drafted tokens of a record: runs, their joining, and records with and without them."""

import numpy as np
import xxhash
from hypothesis import given, strategies as st
from msgspec.structs import replace

from rollstream.streams.codec import decode, encode, is_canonical
from rollstream.streams.records import Trajectory
from rollstream.streams.values import (
    Drafts,
    accepted_mask,
    accepted_tokens,
    extend_runs,
    join_drafts,
)
from testbed.sample_records import trajectory
from tests.streams.record_equality import differences

FLAGS = st.lists(st.booleans(), max_size=30)


def drafts_of(flags: list[bool]) -> Drafts:
    runs = [0]
    for flag in flags:
        extend_runs(runs, 1, guessed=flag)
    return Drafts(tuple(runs), len(flags), sum(flags) + 1, 2, 1, 0.25)


@given(FLAGS)
def test_runs_mark_accepted_tokens(flags: list[bool]) -> None:
    drafts = drafts_of(flags)
    assert accepted_mask(drafts, len(flags)).tolist() == flags
    assert accepted_tokens(drafts) == sum(flags)
    assert sum(drafts.runs) == len(flags)
    assert all(drafts.runs[1:])


@given(st.lists(st.tuples(FLAGS, st.booleans()), max_size=6))
def test_joined_parts_mark_what_each_marked(parts: list[tuple[list[bool], bool]]) -> None:
    """A part without draft runs was sampled by the model, a token a step."""
    reported = [(len(flags), drafts_of(flags) if tells else None) for flags, tells in parts]
    whole = join_drafts(reported)
    if not any(tells for _, tells in parts):
        assert whole is None
        return
    assert whole is not None
    wanted = [flag and tells for flags, tells in parts for flag in flags]
    assert accepted_mask(whole, len(wanted)).tolist() == wanted
    assert whole.steps == len(wanted)
    assert whole.guessed == sum(sum(flags) + 1 for flags, tells in parts if tells)
    assert (whole.asked, whole.found) == (
        2 * sum(tells for _, tells in parts),
        sum(tells for _, tells in parts),
    )


def test_runs_that_do_not_fit_give_as_many_marks_as_fit() -> None:
    assert accepted_mask(Drafts((1, 9), 1, 9, 1, 1, 0.0), 3).tolist() == [False, True, True]
    assert accepted_mask(Drafts((1,), 1, 0, 0, 0, 0.0), 3).tolist() == [False] * 3
    assert accepted_mask(None, 2).tolist() == [False] * 2


def test_a_record_without_drafts_has_no_byte_of_them() -> None:
    plain = trajectory(64)
    assert b"drafts" not in encode(plain)
    reported = replace(plain, drafts=Drafts((1, 30, 1), 2, 30, 2, 1, 0.0005))
    data = encode(reported)
    decoded = decode(data)
    assert differences(reported, decoded.record) == []
    assert is_canonical(data, decoded)
    assert len(data) - len(encode(plain)) < 100


def test_an_older_reader_ignores_them() -> None:
    """Like any unknown field: the arrays stay in place."""
    reported = replace(trajectory(64), drafts=Drafts((1, 30, 1), 2, 30, 2, 1, 0.0005))
    older = encode(reported).replace(b'"drafts"', b'"unknwn"')
    assert b"unknwn" in older
    record = decode(resealed(older)).record
    assert isinstance(record, Trajectory)
    assert record.drafts is None
    assert np.array_equal(record.tokens, reported.tokens)


def resealed(data: bytes) -> bytes:
    """With the checksum of its bytes."""
    return data[:8] + xxhash.xxh3_64_intdigest(data[16:]).to_bytes(8, "little") + data[16:]
