"""The archive holds all of the log: records, and undecodable bytes."""

from collections.abc import Iterable

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from rollstream.errors import (
    ConfigurationError,
    CorruptObject,
    DecodeError,
    NewerRelease,
    SequenceGap,
)
from rollstream.storage.archive.rows import ARCHIVED_CLASSES, classify_rows, with_default
from rollstream.storage.archive.schema import arrow_schema
from rollstream.storage.archive.tables import records_of, table_of
from rollstream.streams.bus import Message
from rollstream.streams.codec import Envelope, decode, encode, is_canonical, record_hash
from rollstream.streams.records import Admitted, Annotation, Fence, Opened, Record, Trajectory
from tests.archive.archive_samples import (
    admission,
    any_record,
    log_of,
    message,
    restored,
    sealed,
    sealed_as_is,
    through_parquet,
    trajectory,
)


def same(one: Record, other: Record) -> bool:
    """Compared by value: equal records are equal bytes, once a default is left out of both."""
    if type(one) is not type(other):
        return False
    one, other = with_default(one, stated=False), with_default(other, stated=False)
    return encode(one) == encode(other)


def all_same(wanted: Iterable[Record], found: Iterable[Record]) -> bool:
    return all(same(one, other) for one, other in zip(wanted, found, strict=True))


@pytest.mark.parametrize("topic", ARCHIVED_CLASSES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_records_come_back_as_they_were_with_the_bytes_that_the_ledger_names(
    topic: str, data: st.DataObject
) -> None:
    drawn = data.draw(st.lists(any_record(topic), min_size=1, max_size=4))
    messages = log_of(topic, drawn)
    table = through_parquet(topic, messages)
    assert table.schema.equals(arrow_schema(topic))
    assert restored(table, topic) == [one.value for one in messages]
    assert table.column("original").null_count == len(messages)  # columns and header hold all of it
    assert table.column("header").null_count == 0
    back = list(records_of(table, with_void=True))
    assert all_same(drawn, back)
    hashes = table.column("hash").to_pylist()
    assert hashes == [record_hash(one.value or b"") for one in messages]


def test_nan_log_probabilities_empty_arrays_and_a_reward_to_come_survive() -> None:
    odd = msgspec.structs.replace(
        trajectory(1), tokens=np.empty(0, np.uint32), sources=np.empty(0, np.uint8),
        logprobs=np.array([np.nan, -np.inf], np.float32), spans=(), reward=None, scores=None,
        task="日本語 \x00 🎲",
    )  # fmt: skip
    empty = msgspec.structs.replace(odd, scores={}, reward=0.0)
    table = through_parquet("trajectories", log_of("trajectories", [odd, empty]))
    one, two = table.to_pylist()
    assert one["tokens"] == []
    assert np.isnan(one["logprobs"][0])
    assert (one["reward"], two["reward"]) == (None, 0.0)
    assert (one["scores"], two["scores"]) == (None, [])
    assert one["task"] == "日本語 \x00 🎲"
    assert all_same([odd, empty], records_of(table))


def test_fields_and_arrays_that_a_newer_program_added_are_kept_as_bytes() -> None:
    value = encode(trajectory(1))
    header = value[16 : 16 + int.from_bytes(value[4:8], "little")]
    newer = header.replace(b'"moves"', b'"mood":"calm","moves"')
    assert newer == header  # a default that is left out: the field moves in front of another
    newer = header.replace(b'"task":', b'"mood":"calm","more:u4":2,"task":')
    arrays = value[(16 + len(header) + 7) // 8 * 8 :]
    padded = arrays + bytes(-len(arrays) % 8) + np.array([7, 8], "<u4").tobytes()
    messages = [message("trajectories", 0, sealed(newer, padded))]
    table = through_parquet("trajectories", messages)
    assert restored(table, "trajectories") == [messages[0].value]
    assert table.column("reason").null_count == 1  # it is a valid record
    assert all_same([trajectory(1)], records_of(table))


def test_a_default_that_the_bytes_state_and_one_left_out_both_come_back() -> None:
    """The 1.0 of a configuration is another object than the class's own 1.0, and is written."""
    stated = msgspec.structs.replace(trajectory(1), temperature=float("1"))
    messages = log_of("trajectories", [trajectory(1), stated, trajectory(2)])
    assert messages[0].value != messages[1].value
    table = through_parquet("trajectories", messages)
    assert table.column("original").null_count == 3
    assert restored(table, "trajectories") == [one.value for one in messages]


def rubbish() -> list[Message]:
    values = [
        b"", b"\x00junk", encode(trajectory(1))[:-3],
        sealed(b'{"record":{"schema":"future/9","x":1}}'),
        encode(admission(3)), None,
        sealed(b'{"record":{"schema":"annotation/1"}}'),
        encode(Annotation("1.0", 1, "n", np.ones(2, np.float32), "s")),
    ]  # fmt: skip
    return [message("annotations", at, value) for at, value in enumerate(values)]


def test_what_is_no_record_is_a_row_with_the_reason_and_the_bytes() -> None:
    messages = rubbish()
    table = through_parquet("annotations", messages)
    rows = table.to_pylist()
    assert [row["offset"] for row in rows] == list(range(len(messages)))
    assert restored(table, "annotations") == [one.value for one in messages]
    reasons = "too few", "too few", "checksum", "future/9", "not belong", "tombstone", "missing"
    for row, words in zip(rows[:-1], reasons, strict=True):
        assert words in row["reason"]
    assert [row["reason"] is None for row in rows] == [False] * 7 + [True]
    assert [type(record) for record in records_of(table)] == [Annotation]


def test_an_integer_beyond_64_bits_does_not_stop_the_archive() -> None:
    header = (
        b'{"record":{"schema":"annotation/1","trajectory":"1.0","group":99999999999999999999999,'
        b'"name":"n","values:f4":1,"scorer":"s"}}'
    )
    good = encode(Annotation("1.0", 1, "n", np.ones(2, np.float32), "s"))
    values = [sealed(header, bytes(4)), good]
    table = table_of("annotations", [message("annotations", *one) for one in enumerate(values)])
    first, second = table.to_pylist()
    assert "does not fit" in first["reason"]
    assert first["original"] == values[0]
    assert second["reason"] is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=60) | st.none(), min_size=1, max_size=5), st.data())
def test_any_bytes_whatever_are_archived(values: list[bytes | None], data: st.DataObject) -> None:
    whole = bytearray(encode(trajectory(2)))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    messages = [message("trajectories", at, v) for at, v in enumerate([*values, bytes(whole)])]
    table = through_parquet("trajectories", messages)
    assert restored(table, "trajectories") == [one.value for one in messages]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_canonical_are_exactly_the_bytes_that_encoding_gives_again(data: st.DataObject) -> None:
    whole = encode(data.draw(any_record("trajectories")), Envelope("dispatch", 1, 2))
    length = int.from_bytes(whole[4:8], "little")
    header, rest = whole[16 : 16 + length], bytearray(whole[16 + length :])
    at = data.draw(st.integers(0, length))
    inserted = data.draw(st.sampled_from([b"", b" ", b"  ", b'"x":1,']))
    if rest and data.draw(st.booleans()):
        rest[data.draw(st.integers(0, min(8, len(rest) - 1)))] = 7
    padding = bytes(-(length + len(inserted)) % 8) if inserted else b""
    kept = bytes(rest[-length % 8 :]) if inserted else bytes(rest)
    value = sealed_as_is(header[:at] + inserted + header[at:], padding + kept)
    try:
        decoded = decode(value)
    except DecodeError:
        return
    again = encode(decoded.record, decoded.envelope)
    assert is_canonical(value, decoded) == (again == value)


def test_records_of_a_replaced_holder_are_rows_marked_void() -> None:
    """Invariant 7: a reader of the archive can leave out the records that readers of the log left
    out.
    """

    def of(term: int, sequence: int, record: Record) -> bytes:
        return encode(record, Envelope("dispatch", term, sequence))

    values = [
        of(1, 0, Opened("dispatch", 1)), of(1, 1, admission(1)), of(2, 0, Opened("dispatch", 2)),
        of(1, 2, admission(2)), of(2, 1, admission(2)), of(2, 1, admission(2)),
        encode(admission(9)),
    ]  # fmt: skip
    messages = [message("admissions", at, value) for at, value in enumerate(values)]
    table = through_parquet("admissions", messages)
    voids = [False, False, False, True, False, True, False]
    assert table.column("void").to_pylist() == voids
    groups = [one.group for one in records_of(table) if isinstance(one, Admitted)]
    assert groups == [1, 2]
    assert "without an envelope" in table.column("reason")[6].as_py()
    assert restored(table, "admissions") == values


def test_a_record_that_the_log_lost_is_reported_and_not_archived_over() -> None:
    values = [
        encode(admission(n), Envelope("dispatch", 1, sequence))
        for n, sequence in enumerate((4, 5, 7))
    ]
    messages = [message("admissions", at, value) for at, value in enumerate(values)]
    with pytest.raises(SequenceGap, match="#7 where #6 comes next"):
        classify_rows("admissions", messages)
    _, fences = classify_rows("admissions", messages[:2])
    assert fences == {0: Fence(1, 6, presumed=True)}


def test_a_column_that_an_older_file_has_not_leaves_the_field_its_default() -> None:
    table = through_parquet("trajectories", log_of("trajectories", [trajectory(3)]))
    older = table.drop_columns(["moves", "scores"])
    (record,) = records_of(older)
    assert isinstance(record, Trajectory)
    assert (record.moves, record.scores) == (0, None)


def test_a_row_that_a_newer_release_wrote_more_of_is_refused_and_not_damaged() -> None:
    """An unknown field is stored as an unknown column; without it the bytes cannot be rebuilt."""
    rows = log_of("trajectories", [trajectory(3)])
    newer = through_parquet("trajectories", rows)
    hashes = pa.array(["00" * 8])
    where = newer.schema.get_field_index("hash")
    newer = newer.set_column(where, "hash", hashes)
    with pytest.raises(CorruptObject, match="differs from its hash"):
        restored(newer, "trajectories")
    more = newer.append_column("novel", pa.array([1]))
    with pytest.raises(NewerRelease, match=r"row 0:0 .*\(novel\)"):
        restored(more, "trajectories")


def test_a_schema_that_a_newer_release_archived_is_no_tombstone() -> None:
    table = through_parquet("trajectories", log_of("trajectories", [trajectory(3)]))
    where = table.schema.get_field_index("schema")
    newer = table.set_column(where, "schema", pa.array(["trajectory/2"]))
    assert list(records_of(newer)) == []
    with pytest.raises(NewerRelease, match="trajectory/2"):
        restored(newer, "trajectories")


def test_bytes_that_an_older_release_archived_unread_are_a_record_to_a_newer_one() -> None:
    """The older release kept them byte for byte, with the reason why it could not decode them."""
    table = through_parquet("trajectories", log_of("trajectories", [trajectory(3)]))
    value = restored(table, "trajectories")[0]
    for name, kept in (("schema", None), ("original", value), ("reason", "schema … not known")):
        where = table.schema.get_field_index(name)
        table = table.set_column(where, name, pa.array([kept], table.schema.field(where).type))
    assert all_same([trajectory(3)], records_of(table))
    assert restored(table, "trajectories") == [value]


def test_tables_of_many_batches_and_slices_give_the_same_records() -> None:
    given = [trajectory(group, group) for group in range(7)]
    table = through_parquet("trajectories", log_of("trajectories", given))
    pieces = pa.concat_tables([table.slice(2, 3), table.slice(0, 2), table.slice(5)])
    order = [2, 3, 4, 0, 1, 5, 6]
    wanted = [given[group] for group in order]
    assert all_same(wanted, records_of(pieces))


def test_a_topic_that_is_not_archived_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="'status' is not archived"):
        arrow_schema("status")
