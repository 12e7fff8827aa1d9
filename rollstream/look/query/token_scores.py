"""The trainer's scores of recorded tokens beside a run: log-probability and entropy under the
version that sampled the token. Parquet, one row per trajectory, replaced as a whole. Imports no
torch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.errors import ConfigurationError
from rollstream.storage.stores.base import content_hash
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Floats
from rollstream.whole_file import whole_file

TOKEN_SCORES_FILE = "token-scores.parquet"
FORMAT, FORMAT_KEY = 1, b"rollstream.token_scores"
TRAJECTORIES_MAX = 200_000
"""Of one file; an export of the explorer holds as many."""
GROUP_ROWS, GROUP_TOKENS = 256, 1 << 20
"""Of a row group, which a reader of one trajectory decodes: it ends with the row that reaches
either.
"""
GROUP_BYTES_MAX = 256 << 20
"""A larger row group is not decoded: the file may be another person's."""
SCHEMA = pa.schema(
    [
        ("trajectory", pa.string()),
        ("group", pa.int64()),
        ("hash", pa.string()),
        ("logprob", pa.list_(pa.float32())),
        ("entropy", pa.list_(pa.float32())),
    ],
    metadata={FORMAT_KEY: str(FORMAT).encode()},
)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTrajectory:
    """The scored trajectory of G generated tokens: `logprobs` [G] at the temperature of the
    sampling, `entropy` [G] in nats; NaN for tokens whose version could not be loaded. `hash` is the
    `text_hash` of the scored record.
    """

    trajectory: str
    group: int
    hash: str
    logprobs: Floats
    entropy: Floats


def text_hash(record: Trajectory) -> str:
    """Returns the text hash of tokens and the rollout's log-probabilities: by it scores never
    appear beside other tokens.
    """
    return content_hash(record.tokens.tobytes() + record.logprobs.tobytes())


def write_token_scores(path: Path, rows: Iterable[ScoredTrajectory]) -> None:
    """Replaces the file by one with these rows and those of other trajectories; a failure leaves it
    as it was. Raises `ConfigurationError` if it cannot be read.
    """
    written: set[str] = set()
    with (
        whole_file(path) as partial,
        pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer,
    ):
        for table in _tables(rows):
            written.update(_names(table))
            writer.write_table(table)
        for table in _stored_tables(path):
            other_rows = table.filter(pa.array([name not in written for name in _names(table)]))
            if other_rows.num_rows:
                writer.write_table(other_rows)


def stored_hashes(path: Path) -> dict[str, str]:
    """Returns the stored hashes by trajectory; {} without a file."""
    hashes: dict[str, str] = {}
    for table in _stored_tables(path, ("trajectory", "hash")):
        hashes |= zip(_names(table), table.column("hash").to_pylist(), strict=True)
    return hashes


def read_token_scores(path: Path, record: Trajectory) -> ScoredTrajectory | None:
    """Reads the token scores of exactly this record; None if there are none. Raises
    `ConfigurationError` for a file that cannot be read.
    """
    for table in _stored_tables(path, group=record.group):
        names = _names(table)
        if record.trajectory in names:
            row = table.slice(names.index(record.trajectory), 1).to_pylist()[0]
            return _matching(row, record)
    return None


def _matching(row: Mapping[str, Any], record: Trajectory) -> ScoredTrajectory | None:
    scores: tuple[list[float | None], ...] = tuple(
        row[name] or [] for name in ("logprob", "entropy")
    )
    if row["hash"] != text_hash(record) or not all(
        len(values) == len(record.logprobs) and None not in values for values in scores
    ):
        return None
    logprobs, entropy = (np.array(values, np.float32) for values in scores)
    return ScoredTrajectory(record.trajectory, record.group, row["hash"], logprobs, entropy)


def _stored_tables(
    path: Path, columns: Sequence[str] | None = None, group: int | None = None
) -> Iterator[pa.Table]:
    file = _opened(path)
    if file is None:
        return
    at = SCHEMA.names.index("group")
    with file:
        for number in range(file.num_row_groups):
            part = file.metadata.row_group(number)
            # With `group`, only row groups that may have one of its trajectories are read.
            statistics: Any = part.column(at).statistics
            if group is not None and statistics is not None and statistics.has_min_max:
                lowest, highest = statistics.min, statistics.max
                if not lowest <= group <= highest:
                    continue
            if part.total_byte_size > GROUP_BYTES_MAX:
                raise _unreadable(path, f"a row group has {part.total_byte_size:,} bytes")
            try:
                table = file.read_row_group(number, columns=columns)
            except (OSError, pa.ArrowException) as error:
                raise _unreadable(path, error) from None
            yield table


def _names(table: pa.Table) -> list[str]:
    return table.column("trajectory").to_pylist()


def _opened(path: Path) -> pq.ParquetFile | None:
    if not path.is_file():
        return None
    try:
        file = pq.ParquetFile(path)
        stored_format = (file.schema_arrow.metadata or {}).get(FORMAT_KEY)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None
    if stored_format != str(FORMAT).encode() or not file.schema_arrow.equals(SCHEMA):
        raise ConfigurationError(
            f"{path} has another format than {FORMAT} of this release; delete it to compute the "
            "scores again"
        )
    return file


def _unreadable(path: Path, error: object) -> ConfigurationError:
    return ConfigurationError(f"{path} cannot be read ({error}); delete it to compute it again")


def _tables(rows: Iterable[ScoredTrajectory]) -> Iterator[pa.Table]:
    batch: list[ScoredTrajectory] = []
    tokens = 0
    for row in rows:
        batch.append(row)
        tokens += len(row.logprobs)
        if len(batch) >= GROUP_ROWS or tokens >= GROUP_TOKENS:
            yield _table(batch)
            batch, tokens = [], 0
    if batch:
        yield _table(batch)


def _table(rows: list[ScoredTrajectory]) -> pa.Table:
    columns = [
        pa.array([row.trajectory for row in rows], pa.string()),
        pa.array([row.group for row in rows], pa.int64()),
        pa.array([row.hash for row in rows], pa.string()),
        _lists([row.logprobs for row in rows]),
        _lists([row.entropy for row in rows]),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _lists(values: list[Floats]) -> pa.Array:
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(np.concatenate(values).astype(np.float32))
    )
