"""Reads columns of JSON Lines, JSON lists, CSV, TSV or Parquet, known by the content, else by the
name. An unreadable row is yielded as a `RowFault`, and the rows after it follow.
"""

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.foreign_json import parse_loose_json
from rollstream.producers.rows.csv_table import CsvTable
from rollstream.storage.model_folder.hf_folder import BOM, is_lfs_pointer, lfs_refusal

KINDS = ".jsonl, .json, .csv, .tsv (also .gz and .zst) and .parquet"
FIRST_ROWS, SAMPLED_EVERY, ROWS_PASSED_MAX = 1000, 997, 2_000_000
_PACKED = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst"}
_FOREIGN = {
    b"ARROW1": "an Arrow file: write it as Parquet",
    b"PK\x03\x04": "an archive or a spreadsheet: unpack it, or save it as CSV",
    b"\xff\xfe": "text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
}
_DAMAGED = (OSError, EOFError, zlib.error)


@dataclass(frozen=True, slots=True)
class RowFault:
    """States why a row cannot be used; `place` is its line or row."""

    path: Path
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, {self.place}: {self.reason}"


@dataclass(slots=True)
class RowSampling:
    """The first rows of large files, and every so many-th of the rest. `rows` counts those that
    were passed, up to `ROWS_PASSED_MAX`, where reading ends.
    """

    rows: int = 0

    @property
    def has_ended(self) -> bool:
        return self.rows >= ROWS_PASSED_MAX

    def takes_next(self) -> bool:
        self.rows += 1
        return self.rows <= FIRST_ROWS or self.rows % SAMPLED_EVERY == 0


PlacedValues = tuple[str, Mapping[str, Any]]
"""The place of a row, such as "line 7", and its named columns."""


def kind_of(path: Path) -> str:
    bare = path.with_suffix("") if path.suffix.lower() in (".gz", ".zst") else path
    return bare.suffix.lower()


def read_file_rows(
    path: Path, columns: Sequence[str], sampling: RowSampling | None = None
) -> Iterator[PlacedValues | RowFault]:
    """Yields the rows without blank lines. Raises `ConfigurationError` if the file is missing,
    damaged or of another kind.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(1024)
        if begin.startswith(b"PAR1"):
            yield from _parquet_rows(path, columns, sampling)
        else:
            with open_text(path, begin) as lines:
                yield from _text_rows(path, lines, columns, sampling)
    except _DAMAGED as error:
        raise ConfigurationError(f"data set {path} cannot be read: {error}") from error


@contextmanager
def open_text(path: Path, begin: bytes) -> Generator[IO[bytes]]:
    """Opens a file, decompressed; `begin` are its first bytes. Raises `ConfigurationError` for
    another kind.
    """
    if is_lfs_pointer(begin):
        raise ConfigurationError(f"data set {lfs_refusal(path)}")
    for magic, remedy in _FOREIGN.items():
        if begin.startswith(magic):
            raise ConfigurationError(f"data set {path} is {remedy}")
    packed = next((name for magic, name in _PACKED.items() if begin.startswith(magic)), "")
    if path.suffix.lower() == ".parquet":
        raise ConfigurationError(f"data set {path} is not a readable Parquet file")
    with path.open("rb") as file:
        if packed == "gz":
            with gzip.open(file) as lines:
                yield cast(IO[bytes], lines)
        elif packed == "zst":
            with _zstd_stream(file) as stream:
                yield io.BufferedReader(stream)
        else:
            yield file


def _zstd_stream(file: IO[bytes]) -> io.RawIOBase:
    import pyarrow

    arrow: Any = pyarrow  # it has no types
    # Unlike zstandard's reader, that of pyarrow raises `OSError` for a frame that is cut.
    return arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), "zstd")


def _text_rows(
    path: Path, lines: IO[bytes], columns: Sequence[str], sampling: RowSampling | None
) -> Iterator[PlacedValues | RowFault]:
    kind = kind_of(path)
    if kind in (".csv", ".tsv"):
        delimiter = "\t" if kind == ".tsv" else ","
        yield from _csv_rows(path, lines, columns, delimiter, sampling)
        return
    numbered = enumerate(lines, start=1)
    written = ((n, line) for n, line in numbered if line.removeprefix(BOM).strip())
    first = next(written, None)
    if first is None:
        return
    begin, second = first[1].removeprefix(BOM).lstrip(), []
    if begin.startswith(b"["):
        second = list(islice(written, 1))
        # A whole list on a line is a row, and no good one, if further rows follow it.
        if kind == ".json" or not second or not _is_json(begin):
            data = begin + b"".join(line for _, line in second) + lines.read()
            yield from _list_rows(path, data, columns, sampling)
            return
    if not begin.startswith((b"{", b"[")) and kind not in (".jsonl", ".ndjson", ".json"):
        raise ConfigurationError(f"data set {path}: only {KINDS} files are read")
    if begin.strip() == b"{" and kind == ".json":
        raise ConfigurationError(
            f"data set {path} is one JSON object over several lines; write one object a line, or "
            "a list of objects"
        )
    lines_left = chain([(first[0], begin)], second, numbered)
    yield from _json_lines(path, _chosen(lines_left, sampling), columns)


def _chosen(
    lines: Iterator[tuple[int, bytes]], sampling: RowSampling | None
) -> Iterator[tuple[int, bytes]]:
    for number, line in lines:
        if not line.strip():
            continue
        if sampling is None or sampling.takes_next():
            yield number, line
        elif sampling.has_ended:
            return


def _is_json(line: bytes) -> bool:
    try:
        parse_loose_json(line)
    except ValueError:
        return False
    return True


def column_value(values: Mapping[str, Any], column: str) -> tuple[Any, ...]:
    """Returns a tuple of the value, () without it. A dotted name that is no column itself is a path
    into nested ones (`reward_model.ground_truth`).
    """
    if column in values:
        return (values[column],)
    top, dot, rest = column.partition(".")
    inner = values.get(top) if dot else None
    return column_value(cast(dict[str, Any], inner), rest) if isinstance(inner, dict) else ()


class _LineDecoder:
    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        tops = (column.partition(".")[0] for column in columns)
        names = dict.fromkeys((*columns, *tops))
        self._keys = [json.dumps(name).encode() for name in names]
        self._names = tuple((name, f"c{number}") for number, name in enumerate(names))
        struct = msgspec.defstruct(
            "NamedColumns",
            [(field, Any, msgspec.UNSET) for _, field in self._names],
            rename={field: name for name, field in self._names},
        )
        # The strict and fast decoder reads only the named columns. Lines that it refuses (`NaN`,
        # halves of surrogate pairs, wrong ones) go to Python's, whose errors name the place.
        self._decode = msgspec.json.Decoder(struct).decode

    def values(self, line: bytes) -> Mapping[str, Any]:
        """Raises `ValueError` for a line without the columns, or nested too deep."""
        if any(line.count(key) > 1 for key in self._keys):  # the decoder would take the last one
            return _columns_of(_parse_pairs(line), self._columns)
        try:
            row = self._decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _columns_of(_parse_pairs(line), self._columns)
        fields = ((name, getattr(row, field)) for name, field in self._names)
        values = {name: item for name, item in fields if item is not msgspec.UNSET}
        if all(column_value(values, column) for column in self._columns):
            return values
        return _columns_of(
            _parse_pairs(line), self._columns
        )  # the error lists the columns of the row


class _NoObject(ValueError):
    """Raised for a row that is JSON and no object of columns."""


class _RepeatingRow(dict[str, Any]):
    # Names that the object had twice.
    repeated: tuple[str, ...] = ()


def _of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    row, counts = _RepeatingRow(values), Counter(name for name, _ in pairs)
    row.repeated = tuple(name for name, count in counts.items() if count > 1)
    return row


def _parse_pairs(data: bytes) -> Any:
    return parse_loose_json(data, _of_pairs)


def _columns_of(row: object, columns: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise _NoObject(f"must be an object of columns, got {shown(row)}")
    for column in columns:
        if isinstance(row, _RepeatingRow) and column.partition(".")[0] in row.repeated:
            raise _NoObject(f"has the column {column!r} twice")
    return cast(dict[str, Any], row)


def shown(item: object) -> str:
    """Returns the item for an error message, cut off."""
    text = repr(item)
    return text if len(text) <= 80 else text[:80] + "…"


def _json_lines(
    path: Path, lines: Iterator[tuple[int, bytes]], columns: Sequence[str]
) -> Iterator[PlacedValues | RowFault]:
    decoder = _LineDecoder(columns)
    for number, line in lines:
        place = f"line {number}"
        try:
            yield place, decoder.values(line)
        except _NoObject as error:
            yield RowFault(path, place, str(error))
        except ValueError as error:  # no JSON, or no UTF-8
            yield RowFault(path, place, f"not JSON: {error}")


def _list_rows(
    path: Path, data: bytes, columns: Sequence[str], sampling: RowSampling | None
) -> Iterator[PlacedValues | RowFault]:
    try:
        # The list stands in the memory as a whole.
        items = _parse_pairs(data)
    except ValueError as error:
        raise ConfigurationError(f"data set {path} is not JSON: {error}") from None
    for number, item in enumerate(cast(list[object], items), start=1):
        if sampling is not None and not sampling.takes_next():
            continue
        try:
            yield f"item {number}", _columns_of(item, columns)
        except _NoObject as error:
            yield RowFault(path, f"item {number}", str(error))


def _csv_rows(
    path: Path,
    lines: IO[bytes],
    columns: Sequence[str],
    delimiter: str,
    sampling: RowSampling | None,
) -> Iterator[PlacedValues | RowFault]:
    # Bytes that are not UTF-8 become halves of surrogate pairs, so their row is refused by itself.
    table = CsvTable(io.TextIOWrapper(lines, "utf-8-sig", "surrogateescape", newline=""), delimiter)
    header = table.header
    repeated = [column for column in columns if header.count(column) > 1]
    if repeated:
        raise ConfigurationError(f"data set {path} has two columns {repeated[0]!r}")
    for number, fields in table:
        place = f"line {number}"
        if not fields:
            continue
        if sampling is not None and not sampling.takes_next():
            if sampling.has_ended:
                return
            continue
        if isinstance(fields, csv.Error):
            yield RowFault(path, place, f"not CSV: {fields}")
            continue
        if len(fields) != len(header):
            yield RowFault(path, place, f"{len(fields)} fields, the header has {len(header)}")
            continue
        yield place, dict(zip(header, fields, strict=True))


def _parquet_rows(
    path: Path, columns: Sequence[str], sampling: RowSampling | None
) -> Iterator[PlacedValues | RowFault]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            tops = [name if name in names else name.partition(".")[0] for name in columns]
            for name in tops:
                if names.count(name) > 1:
                    raise ConfigurationError(f"data set {path} has two columns {name!r}")
            # Only named columns: another one may be of a type that Python's values cannot hold.
            read = list(dict.fromkeys(name for name in tops if name in names))
            others = dict.fromkeys(set(names) - set(read)) if set(tops) - set(names) else {}
            for batch in file.iter_batches(columns=read, batch_size=1024):
                places = range(batch.num_rows)
                if sampling is not None:
                    places = [place for place in places if sampling.takes_next()]
                for at, values in zip(places, _batch_rows(batch, places), strict=True):
                    place = f"row {number + at + 1}"
                    if isinstance(values, str):
                        yield RowFault(path, place, values)
                    else:
                        yield place, {**others, **values}
                number += batch.num_rows
                if sampling is not None and sampling.has_ended:
                    return
    except (ArrowException, *_UNCONVERTED) as error:  # also of the footer's own types
        raise ConfigurationError(
            f"data set {path} is not a readable Parquet file: {error}"
        ) from error


_UNCONVERTED = (ArithmeticError, LookupError, ValueError)
"""Text that is no UTF-8, times in nanoseconds, an unknown zone, a number beyond Python's."""


def _batch_rows(batch: Any, places: Sequence[int]) -> Iterator[Mapping[str, Any] | str]:
    if not places:
        return
    try:
        yield from (batch if len(places) == batch.num_rows else batch.take(places)).to_pylist()
        return
    except _UNCONVERTED:
        pass
    # One value that Python cannot hold fails the whole batch, so each row is converted by itself.
    for place in places:
        try:
            yield batch.slice(place, 1).to_pylist()[0]
        except _UNCONVERTED as error:
            yield f"cannot be converted: {error}"
