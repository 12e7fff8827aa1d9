"""Named arrays beside tokens: they survive the wire and a chain of partials row by row, cost
nothing where there are none, and no foreign ones reach the trainer (invariants 12 and 14).
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as st_numpy
from msgspec.structs import replace
from numpy.typing import NDArray

from rollstream.storage.claim_check import ClaimCheck
from rollstream.storage.stores.file import FileStore
from rollstream.streams.admissible import TrainingBounds, malformed_partial, refusal
from rollstream.streams.codec import decode, encode, header_bytes, is_canonical
from rollstream.streams.records import Partial, Trajectory
from rollstream.streams.token_arrays import (
    ALLOWED,
    ARRAYS_MAX,
    DTYPES,
    NO_ARRAYS,
    ROW_BYTES_MAX,
    GrowingArrays,
    array_fields,
    arrays_of,
    make_piece,
)
from rollstream.streams.topics import catalogue
from rollstream.streams.values import ArrayHead, TokenRange
from rollstream.streams.writer import publish
from testbed.memory import MemoryBus
from testbed.sample_records import LOGPROBS, SPANS, trajectory
from testbed.two_programs import earlier_program
from testbed.waiting import WAIT_S

TOKENS = 12
BOUNDS = TrainingBounds(vocabulary=TOKENS, context_max=64)
names = st.from_regex(r"[a-z][a-z0-9_]{0,63}", fullmatch=True)


@st.composite
def rows(draw: st.DrawFn, count: int) -> NDArray[Any]:
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    values = None
    if dtype.startswith("float"):
        values = st.floats(-8, 8, width=16)
    return draw(st_numpy.arrays(dtype, (count, *shape), elements=values))


@st.composite
def parts(draw: st.DrawFn) -> dict[str, list[tuple[int, NDArray[Any]]]]:
    """For each array its rows, and where they start."""
    drawn: dict[str, list[tuple[int, NDArray[Any]]]] = {}
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        edges = sorted(draw(st.sets(st.integers(0, TOKENS), min_size=2, max_size=5)))
        whole = draw(rows(TOKENS))
        drawn[name] = [(a, whole[a:b]) for a, b in zip(edges[:-1:2], edges[1::2], strict=False)]
    return drawn


def with_arrays(
    record: Trajectory, pieces: dict[str, list[tuple[int, NDArray[Any]]]]
) -> Trajectory:
    made = [make_piece(name, rows, start) for name, all in pieces.items() for start, rows in all]
    return replace(record, **array_fields(made))


@given(parts())
@settings(max_examples=40, deadline=None)
def test_arrays_of_any_name_type_shape_and_tokens_survive_the_wire(
    drawn: dict[str, list[tuple[int, NDArray[Any]]]],
) -> None:
    data = encode(with_arrays(trajectory(TOKENS), drawn))
    decoded = decode(data)
    assert is_canonical(data, decoded)
    assert isinstance(decoded.record, Trajectory)
    arrays = arrays_of(decoded.record)
    assert [piece.head.name for piece in arrays.pieces] == list(drawn)
    for name, expected in drawn.items():
        array = arrays.get(name)
        assert array is not None
        assert array.values.dtype == expected[0][1].dtype
        assert np.array_equal(array.values, np.concatenate([rows for _, rows in expected]))
        tokens = [np.arange(start, start + len(rows)) for start, rows in expected]
        assert np.array_equal(array.tokens, np.concatenate(tokens))


def test_without_arrays_no_byte_is_written() -> None:
    header = header_bytes(encode(trajectory(TOKENS)))
    assert not {b"array", b"needs"} & {word for word in (b"array", b"needs") if word in header}
    decoded = decode(encode(trajectory(TOKENS))).record
    assert isinstance(decoded, Trajectory)
    assert arrays_of(decoded) is NO_ARRAYS


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), max_size=8),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_each_row_is_in_one_partial_and_all_are_in_the_record(
    emitted: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    """Emissions with rows of earlier tokens too, partials that leave the newest token out."""
    growing, length, partials, expected = GrowingArrays(), 3, [], dict[int, float]()
    for count, extra, is_flushed in emitted:
        first = length
        length += count
        behind = min(extra, first)
        values = np.arange(first - behind, length, dtype=np.float32) + 100 * length
        growing.add({"x": values}, length, 0)
        for token in range(max(first - behind, max(expected, default=-1) + 1), length):
            expected[token] = 100.0 * length + token
        if is_flushed:
            partials += growing.flush(length - data.draw(st.integers(0, 1)))
    for pieces in ([*partials, *growing.flush(length)], growing.pieces):
        record = with_pieces(trajectory(2 * length), pieces)
        array = arrays_of(record).get("x")
        found = {} if array is None else dict(zip(array.tokens, array.values, strict=True))
        assert found == (expected if emitted else {})


def with_pieces(record: Trajectory, pieces: Any) -> Trajectory:
    return replace(record, **array_fields(pieces))


def test_a_resumed_chain_keeps_its_rows_whatever_the_next_engine_writes() -> None:
    """A token without a row was generated by an engine that does not write the array."""
    before = [make_piece("x", np.ones((2, 3), np.uint8), 4)]
    growing = GrowingArrays.resumed(before)
    growing.add({}, 8, 0)
    growing.add({"x": np.full((5, 3), 2, np.uint8)}, 9, 8)
    array = arrays_of(with_pieces(trajectory(TOKENS), growing.pieces)).get("x")
    assert array is not None
    rows, is_covered = array.at(np.arange(4, 10))
    assert rows[:, 0].tolist() == [1, 1, 0, 0, 2, 0]
    assert is_covered.tolist() == [True, True, False, False, True, False]
    assert growing.flushed == 1


def head(**changed: Any) -> ArrayHead:
    values = {"name": "x", "dtype": "uint8", "shape": (), "ranges": (TokenRange(6, 8),), "bytes": 0}
    return ArrayHead(**(values | changed))


def foreign(data: bytes, *heads: ArrayHead, needs: tuple[str, ...] = ()) -> dict[str, Any]:
    given = [replace(one, bytes=one.bytes or len(data)) for one in heads]
    return {"arrays": tuple(given), "array_bytes": np.frombuffer(data, np.uint8), "needs": needs}


def compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(1).compress(data)


TWO = compressed(bytes([1, 2]))
NAN = compressed(np.array([1, np.nan], np.float32).tobytes())
WIDE = (TokenRange(0, TOKENS),)
FOREIGN = {
    "bytes without an array": {"array_bytes": np.zeros(3, np.uint8)},
    "an array without bytes": {"arrays": (head(bytes=3),)},
    "too many": foreign(
        TWO * (ARRAYS_MAX + 1),
        *(head(name=f"x{n}", bytes=len(TWO)) for n in range(ARRAYS_MAX + 1)),
    ),
    "one twice": foreign(TWO + TWO, head(bytes=len(TWO)), head(bytes=len(TWO), dtype="bool")),
    "a name that is none": foreign(TWO, head(name="../x")),
    "an unknown type": foreign(TWO, head(dtype="object")),
    "a wide row": foreign(TWO, head(shape=(ROW_BYTES_MAX, 2))),
    "a row of a huge shape": foreign(TWO, head(shape=(1 << 70,))),
    "a shape below 1": foreign(TWO, head(shape=(-1,))),
    "tokens beyond the end": foreign(TWO, head(ranges=(TokenRange(11, 13),))),
    "tokens that go back": foreign(TWO, head(ranges=(TokenRange(7, 8), TokenRange(6, 7)))),
    "tokens below 0": foreign(TWO, head(ranges=(TokenRange(-1, 1),))),
    "no tokens": foreign(TWO, head(ranges=())),
    "other bytes than stated": foreign(TWO, head(bytes=len(TWO) - 1)),
    "bytes below 0": foreign(TWO, head(bytes=-5)),
    "no frame": foreign(b"abcdefgh", head()),
    "half a frame": foreign(TWO[:-3], head()),
    "fewer rows": foreign(compressed(b"a"), head()),
    "more rows": foreign(compressed(bytes(1 << 20)), head()),
    "a truth value of 2": foreign(TWO, head(dtype="bool")),
    "not a number": foreign(NAN, head(dtype="float32")),
    "allowed tokens without their word": foreign(TWO, head(name=ALLOWED, shape=(1,))),
    "a token that was not allowed": foreign(
        compressed(bytes([0, 0])), head(name=ALLOWED, shape=(1,)), needs=("arrays/allowed",)
    ),
    "allowed tokens of another vocabulary": foreign(
        compressed(bytes([255] * 6)), head(name=ALLOWED, shape=(3,)), needs=("arrays/allowed",)
    ),
    "allowed tokens as numbers": foreign(
        compressed(np.ones(2, np.float32).tobytes()), head(name=ALLOWED, dtype="float32"),
        needs=("arrays/allowed",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("changed", FOREIGN.values(), ids=FOREIGN)
def test_foreign_arrays_are_refused_before_a_take(changed: dict[str, Any]) -> None:
    sent = decode(encode(replace(trajectory(TOKENS), **changed))).record
    assert isinstance(sent, Trajectory)
    refused = refusal(sent, BOUNDS)
    assert refused is not None
    assert refused.kind == "arrays"
    assert len(refused.detail) <= 300


def test_a_record_that_needs_an_unknown_feature_is_refused_and_not_resumed() -> None:
    later = replace(trajectory(TOKENS), needs=("arrays/later",))
    refused = refusal(later, BOUNDS)
    assert refused is not None
    assert (refused.kind, "arrays/later" in refused.detail) == ("needs", True)
    link = Partial(
        "g7.0", 7, 2, "r", 1, None, 4, np.zeros(2, np.uint32), np.zeros(0, np.uint8), LOGPROBS,
        SPANS,
    )  # fmt: skip
    assert not malformed_partial(link)
    assert "arrays/later" in malformed_partial(replace(link, needs=("arrays/later",)))


def test_information_needs_nothing_and_allowed_tokens_need_their_word() -> None:
    information = with_arrays(trajectory(TOKENS), {"experts": [(6, np.zeros((6, 2), np.uint8))]})
    assert not information.needs
    assert refusal(information, BOUNDS) is None
    every = np.full((6, 2), 255, np.uint8)
    masked = with_arrays(trajectory(TOKENS), {ALLOWED: [(6, every)]})
    assert masked.needs == ("arrays/allowed",)
    assert refusal(masked, BOUNDS) is None


EARLIER = """
import sys
from rollstream.streams.codec import decode
record = decode(bytes.fromhex(sys.stdin.read())).record
print(type(record).__name__, record.trajectory, record.tokens.tolist(), hasattr(record, "arrays"))
"""


def test_an_earlier_program_reads_a_trajectory_and_passes_over_its_arrays(tmp_path: Path) -> None:
    program = earlier_program(tmp_path)
    record = with_arrays(trajectory(TOKENS), {"experts": [(6, np.ones((6, 2), np.uint8))]})
    done = subprocess.run(
        [sys.executable, "-c", EARLIER],
        input=encode(record).hex(), capture_output=True, text=True, check=True,
        cwd=program.folder, env=program.environment, timeout=WAIT_S,
    )  # fmt: skip
    assert done.stdout.strip() == f"Trajectory g7.0 {list(range(TOKENS))} False"


def test_large_arrays_go_to_the_store_and_sparse_ones_are_compressed(tmp_path: Path) -> None:
    log = MemoryBus()
    bus = ClaimCheck(log, FileStore(str(tmp_path)))
    bus.create(catalogue(1))
    noise = np.random.default_rng(0).integers(0, 256, (TOKENS, ROW_BYTES_MAX), np.uint8)
    masks = np.zeros_like(noise)
    masks[:, :2] = 3
    for arrays in ({"one": noise, "two": noise[::-1]}, {"masks": masks}):
        pieces = {name: [(0, rows)] for name, rows in arrays.items()}
        publish(bus, "trajectories", "7", with_arrays(trajectory(TOKENS), pieces))
    assert [len(message.value or b"") < 2000 for message in log.read("trajectories", {0: 0})] == [
        True, True,
    ]  # fmt: skip
    received = [message.value for message in bus.read("trajectories", {0: 0})]
    records = [decode(value).record for value in received if value]
    found = [arrays_of(record) for record in records if isinstance(record, Trajectory)]
    for arrays, name, expected in zip(
        (found[0], found[0], found[1]), ("one", "two", "masks"), (noise, noise[::-1], masks),
        strict=True,
    ):  # fmt: skip
        array = arrays.get(name)
        assert array is not None
        assert np.array_equal(array.values, expected)
