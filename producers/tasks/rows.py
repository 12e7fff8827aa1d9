"""Reads the rows of a data set in JSON Lines or Parquet.

Nothing is repaired and nothing is skipped: a row without a usable prompt raises
`ConfigurationError` with its line or row number.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rollstream.errors import ConfigurationError
from rollstream.import_path import nearest
from rollstream.producers.tasks.text import PromptContent


@dataclass(frozen=True, slots=True)
class DatasetColumns:
    """Names of the columns; "" for a column that is not used."""

    prompt: str
    reference: str
    answer: str


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """`place` is the row's position in its file; `reference` is JSON."""

    place: str
    prompt: PromptContent
    reference: str
    answer: str

    @property
    def question_key(self) -> str:
        """Rows with equal content hold the same prompt."""
        return json.dumps(self.prompt, sort_keys=True)


def read_rows(path: Path, columns: DatasetColumns) -> list[DatasetRow]:
    """Read all rows, at least one."""
    readers: Mapping[str, Callable[[Path], Iterator[tuple[str, Mapping[str, Any]]]]] = {
        ".jsonl": _json_lines,
        ".parquet": _parquet,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigurationError(f"data set {path}: only .jsonl and .parquet files are read")
    if not path.is_file():
        raise ConfigurationError(
            f"data set {path}: no such file; paths are relative to the working directory "
            f"({Path.cwd()})"
        )
    try:
        rows = [_row(path, place, values, columns) for place, values in reader(path)]
    except OSError as error:
        raise ConfigurationError(f"data set {path} cannot be read: {error}") from error
    if not rows:
        raise ConfigurationError(f"data set {path} is empty: there is nothing to ask")
    return rows


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line.decode())
            except ValueError as error:  # invalid JSON or invalid UTF-8
                raise ConfigurationError(
                    f"data set {path}, line {number} is not JSON: {error}"
                ) from None
            if not isinstance(values, dict):
                raise ConfigurationError(
                    f"data set {path}, line {number} must be an object of columns, "
                    f"got {_shown(values)}"
                )
            yield f"line {number}", cast(dict[str, Any], values)


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield f"row {number}", values
    except ArrowException as error:
        raise ConfigurationError(
            f"data set {path} is not a readable Parquet file: {error}"
        ) from error


def _row(path: Path, place: str, values: Mapping[str, Any], columns: DatasetColumns) -> DatasetRow:
    where = f"data set {path}, {place}"
    prompt = _prompt_content(where, columns.prompt, _value(where, values, "prompt", columns.prompt))
    reference = None
    if columns.reference:
        reference = _value(where, values, "reference", columns.reference)
    try:
        packed = json.dumps(reference)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{where}: {columns.reference} is not a JSON value: {error}"
        ) from None
    answer = _value(where, values, "answer", columns.answer) if columns.answer else ""
    if not isinstance(answer, str):
        raise ConfigurationError(f"{where}: {columns.answer} must be text, got {_shown(answer)}")
    return DatasetRow(place, prompt, packed, answer)


def _value(where: str, values: Mapping[str, Any], option: str, column: str) -> Any:
    if column not in values:
        hint = nearest(column, values) or f"; it has {', '.join(sorted(values)) or 'none'}"
        raise ConfigurationError(f"{where} has no column {column!r} (task.options.{option}){hint}")
    return values[column]


def _prompt_content(where: str, column: str, value: Any) -> PromptContent:
    if isinstance(value, str) and value:
        return value
    wanted = f"{where}: {column} must be text or a list of chat messages"
    if not isinstance(value, list) or not value:
        raise ConfigurationError(f"{wanted}, got {_shown(value)}")
    messages = cast(list[Any], value)
    for one in messages:
        if not isinstance(one, dict) or not all(
            isinstance(cast(dict[str, Any], one).get(key), str) for key in ("role", "content")
        ):
            raise ConfigurationError(f"{wanted} with role and content, got {_shown(one)}")
    if messages[-1]["role"] == "assistant":
        raise ConfigurationError(
            f"{where}: the last message of {column} is the assistant's: there is nothing to answer"
        )
    return [{"role": one["role"], "content": one["content"]} for one in messages]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
