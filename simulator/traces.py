"""Recorded answer lengths: a text file, a Parquet file, or an archive of a run."""
# pyarrow ships no types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from pathlib import Path

from rollstream.producers.engines.paced.lengths import LengthTrace, read_trace
from rollstream.errors import ConfigurationError

TOPIC = {"trajectories", "topic=trajectories"}


def read_lengths(path: str, column: str) -> LengthTrace:
    """Lengths ≥ 1 in ascending order. Raises `ConfigurationError`, which names the missing file or
    column.
    """
    where = Path(path)
    if where.is_dir() or where.suffix == ".parquet":
        return _of_parquet(where, column)
    try:
        return read_trace(path)
    except ConfigurationError as error:  # the message names the paced engine's setting
        raise ConfigurationError(str(error).replace("paced.lengths", "lengths")) from None


def _of_parquet(where: Path, column: str) -> LengthTrace:
    """Lengths of an archive's trajectories; of all files of the folder if it is not an archive."""
    files = sorted(where.rglob("*.parquet")) if where.is_dir() else [where]
    own = [file for file in files if TOPIC & set(file.parts)]
    found = sorted(n for file in own or files for n in _read(file, column) if n >= 1)
    if not found:
        raise ConfigurationError(f"lengths.trace: no lengths in column {column} of {where}")
    return LengthTrace(tuple(found))


def _read(file: Path, column: str) -> list[float]:
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    try:
        values = parquet.ParquetFile(file).read(columns=[column]).column(column)
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        raise ConfigurationError(
            f"lengths.trace: no column {column} can be read from {file}: {error}"
        ) from None
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = compute.list_value_length(values)
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise ConfigurationError(
            f"lengths.trace: column {column} of {file} is {values.type}, neither number nor list"
        )
    return [float(value) for value in values.drop_null().to_pylist()]
