"""The log of a run of the evidence: its trajectories in the order in which they were trained, as
one file in the archive's format (docs/reference/archive.md).

A run's weights follow from its warm model and this log alone, without generation. `logged_path`
names the committed logs, one seed of each arm; `evidence_runs --replay` trains them again.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pyarrow.parquet as pq

from rollstream.storage.archive.files import encode_file
from rollstream.storage.archive.originals import OriginalBytes, messages_in
from rollstream.streams.bus import Message
from rollstream.streams.codec import decode, encode
from rollstream.streams.records import Fence, Trajectory
from studies.evidence.generation import Group
from studies.evidence.rows import RUNS, row_path

LOGGED_SEED = 0
TOPIC = "trajectories"


def logged_path(world: str, arm: str, root: Path = RUNS) -> Path:
    """Returns the path of the committed log of an arm."""
    return row_path(world, arm, LOGGED_SEED, root).with_name(f"log-{LOGGED_SEED}.parquet")


def write_log(path: Path, steps: Sequence[Sequence[Group]]) -> None:
    """Write the groups of each step."""
    records = [one for groups in steps for group in groups for one in group]
    messages = [
        Message(TOPIC, 0, offset, 0, one.trajectory.encode(), encode(one))
        for offset, one in enumerate(records)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(encode_file(TOPIC, messages, Fence(0, 0)).data)
    partial.replace(path)


def read_log(path: Path, groups_per_step: int) -> list[list[Group]]:
    """Returns the groups of each step; `groups_per_step` is that of the run."""
    each: list[Group] = [list(found) for _, found in groupby(_records(path), lambda one: one.group)]
    return [each[at : at + groups_per_step] for at in range(0, len(each), groups_per_step)]


def _records(path: Path) -> Iterator[Trajectory]:
    originals = OriginalBytes(TOPIC)
    for batch in pq.ParquetFile(path).iter_batches():
        for message in messages_in(batch, originals, 0):
            record = decode(message.value or b"").record
            assert isinstance(record, Trajectory), "written by write_log"
            yield record
