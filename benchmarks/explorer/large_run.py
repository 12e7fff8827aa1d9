"""Writes the archive of a finished run of up to a million trajectories in a minute, for the
explorer's measurements (`write_large_run`).

Trajectories are those of one generated file, with other names, groups, versions and times in each
further file; ledger and admissions are whole. Hashes are not those of the records, so no command
that verifies originals can read it.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.storage.archive.file_names import archive_key
from rollstream.storage.archive.files import encode_file
from rollstream.storage.archive.tables import table_of
from rollstream.streams.bus import Message
from rollstream.streams.codec import Envelope, encode
from rollstream.streams.records import (
    Admitted,
    Fence,
    GroupClosed,
    Opened,
    Record,
    StepDone,
    Take,
    Trajectory,
)
from rollstream.streams.values import Address, GroupMembers, Member, ReadTo, Span, Version

RUN = "large"
FILE_ROWS = 50_000
SAMPLES, GROUPS_PER_STEP, TAKES_PER_STEP = 8, 64, 4
STEP_ROWS = SAMPLES * GROUPS_PER_STEP
ROLLOUTS, TOKENS = 16, 24
STARTED_MS = 1_763_700_000_000
TRAJECTORY_MS = 20  # one finishes every 20 ms: a run of five and a half hours
FILTERED = 16  # every sixteenth group is closed without training


def write_large_run(folder: Path, rows: int) -> None:
    """Write a run's folder with a store that holds only an archive."""
    configuration = {"run": RUN, "store": "file:store", "bus": "sqlite:bus"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(configuration))
    store = folder / "store"
    _write_trajectories(store, rows)
    groups = rows // SAMPLES
    _write_topic(store, "admissions", "dispatch", _admissions(groups))
    _write_topic(store, "ledger", "trainer", _ledger(groups))


def time_ms(row: int) -> int:
    """Returns the time at which a trajectory finishes."""
    return STARTED_MS + row * TRAJECTORY_MS


def _write_trajectories(store: Path, rows: int) -> None:
    base = table_of("trajectories", [_message(number) for number in range(FILE_ROWS)])
    for first in range(0, rows, FILE_ROWS):
        count = min(FILE_ROWS, rows - first)
        table = _renamed(base.slice(0, count), np.arange(first, first + count))
        path = store / archive_key("trajectories", RUN, 0, first, time_ms(first))
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
            writer.write_table(table)
            last = str(first + count - 1)
            metadata = {"first": str(first), "last": last, "fence": "0:0", "schema": "1"}
            writer.add_key_value_metadata({f"rollstream.{k}": v for k, v in metadata.items()})


def _renamed(table: pa.Table, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> pa.Table:
    """Returns the trajectories with the numbers `rows` instead of their own."""
    late = (rows - rows[0]) * 0.0 + rows[0] * TRAJECTORY_MS / 1000
    versions = rows // STEP_ROWS
    values = {
        "offset": pa.array(rows),
        "group": pa.array(rows // SAMPLES),
        "trajectory": pa.array([f"{row // SAMPLES}.{row % SAMPLES}" for row in rows.tolist()]),
        "started_s": pa.array(table.column("started_s").to_numpy() + late),
        "finished_s": pa.array(table.column("finished_s").to_numpy() + late),
        "timestamp": pa.array(STARTED_MS + rows * TRAJECTORY_MS, pa.timestamp("ms", tz="UTC")),
        "trainer_version": pa.StructArray.from_arrays(
            [pa.array(versions), pa.array(np.ones_like(rows))], names=["number", "term"]
        ),
        "spans": _spans(table, versions - rows % 3),
    }
    for name, column in values.items():
        index = table.schema.get_field_index(name)
        field = table.schema.field(index)
        table = table.set_column(index, field, column.cast(field.type))
    return table


def _spans(table: pa.Table, versions: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> pa.Array:
    """Returns one span per trajectory, of all its generated tokens."""
    column = table.column("spans").combine_chunks()
    spans = column.flatten()
    version = pa.StructArray.from_arrays(
        [pa.array(np.maximum(versions, 0)), pa.array(np.ones_like(versions))],
        names=["number", "term"],
    )
    parts = [spans.field("start"), spans.field("end"), version]
    struct = pa.StructArray.from_arrays(parts, names=["start", "end", "version"])
    offsets = pa.array(np.arange(len(table) + 1, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, struct)


def _message(number: int) -> Message:
    random = np.random.default_rng(number)
    length = 8 + int(random.exponential(TOKENS))
    finished_s = time_ms(number) / 1000
    record = Trajectory(
        trajectory=str(number),
        group=number,
        index=number % SAMPLES,
        attempt=1,
        task=("remainder", "countdown", "chess")[number // SAMPLES % 3],
        rollout=f"rollout-{number % ROLLOUTS}",
        rollout_term=1,
        tokens=random.integers(0, 250, length + 8, dtype=np.uint32),
        sources=np.repeat(np.array([0, 1], np.uint8), [8, length]),
        logprobs=-random.random(length, dtype=np.float32),
        spans=(Span(0, length, Version(0, 1)),),
        finish="stop" if number % 10 else "length",
        reward=float(random.random() < 0.6),
        trainer_version=Version(0, 1),
        started_s=finished_s - 0.2 - float(random.exponential(3)),
        finished_s=finished_s,
    )
    return Message("trajectories", 0, number, time_ms(number), b"%d" % number, encode(record))


def _admissions(groups: int) -> Iterator[tuple[Record, int]]:
    yield Opened("dispatch", 1), STARTED_MS - 60_000
    for group in range(groups):
        names = tuple(f"{group}.{index}" for index in range(SAMPLES))
        found = Admitted(group, group // GROUPS_PER_STEP, names, 600.0, Address(0, group + 1))
        yield found, time_ms(group * SAMPLES) - 20_000


def _ledger(groups: int) -> Iterator[tuple[Record, int]]:
    """Yields the takes, closings and steps; every group is trained in the step of its number."""
    yield Opened("trainer", 1), STARTED_MS - 30_000
    for step in range(1, groups // GROUPS_PER_STEP + 1):
        first = (step - 1) * GROUPS_PER_STEP
        now = time_ms(step * STEP_ROWS)
        for take in range(TAKES_PER_STEP):
            share = GROUPS_PER_STEP // TAKES_PER_STEP
            mine = range(first + take * share, first + (take + 1) * share)
            yield _take(step, take, [group for group in mine if group % FILTERED]), now
            for group in mine:
                if group % FILTERED == 0:
                    yield GroupClosed(group, "filtered", "all rewards are 1", step), now
        yield _done(step, now / 1000), now + 500


def _take(step: int, take: int, groups: Sequence[int]) -> Take:
    found = tuple(
        GroupMembers(
            group,
            tuple(
                Member(f"{group}.{i}", Address(0, group * SAMPLES + i), "0" * 16)
                for i in range(SAMPLES)
            ),
        )
        for group in groups
    )
    members = tuple(member for group in found for member in group.members)
    read = (ReadTo("trajectories", (step * STEP_ROWS,)),)
    return Take(step, 0, take, members, found, read=read, believed=Version(step - 1, 1))


def _done(step: int, time_s: float) -> StepDone:
    metrics = {
        "reward_mean": 0.6, "loss": 1.0 / step, "seconds": 10.0, "ess": 0.99, "entropy": 1.0,
        "lag_consumed_mean": 1.0, "lag_consumed_max": 2.0, "length_median": 30.0,
        "tokens_trained": 16_384.0,
    }  # fmt: skip
    return StepDone(
        step, Version(step, 1), f"{step:032x}", TAKES_PER_STEP, metrics, {"dropped": 0}, time_s
    )


def _write_topic(store: Path, topic: str, role: str, records: Iterator[tuple[Record, int]]) -> None:
    messages = [
        Message(topic, 0, at, now, role.encode(), encode(record, Envelope(role, 1, at)))
        for at, (record, now) in enumerate(records)
    ]
    path = store / archive_key(topic, RUN, 0, 0, messages[0].timestamp_ms)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_file(topic, messages, Fence()).data)
