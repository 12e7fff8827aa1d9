"""Implements the task `dataset`: prompts come from a file (JSON Lines or Parquet), and a user's
function, `verifier(answer, reference)`, returns the reward of an answer (docs/reference/tasks.md).

`read_rows` reads and checks the file; `Dataset` splits its rows into training and held-out ones and
makes prompts of them. The prompt source, evaluation and warm-up (which trains a new model on given
answers before the run) read the file. Reward processes do not: each prompt carries its row's
reference. The file must not change during a run, because prompts are found by their place in it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable, nearest
from rollstream.producers.tasks.base import Document, Score, TaskPrompt, Turns, shuffled
from rollstream.producers.tasks.text import PromptContent, TaskText
from rollstream.producers.tasks.text_tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class DatasetColumns:
    """Names the columns of the prompt, the reference and the answer for the warm-up. A reference or
    answer named "" is not read.
    """

    prompt: str
    reference: str
    answer: str


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """Holds one row of the file. `place` is its position, e.g. "line 7"; `reference` is the JSON
    text of the reference, "null" without one; `answer` is "" without one.
    """

    place: str
    prompt: PromptContent
    reference: str
    answer: str

    @property
    def question_key(self) -> str:
        """The prompt as text: two rows have equal keys only if their prompts are equal."""
        return json.dumps(self.prompt, sort_keys=True)


def read_rows(path: Path, columns: DatasetColumns) -> list[DatasetRow]:
    """Returns all rows of the file, at least one. Only blank lines are skipped. Raises
    `ConfigurationError` for a file or row that cannot be used, with the number of the line or row.
    """
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
    """Yields the place and the columns of each line."""
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
    """Yields the place and the columns of each row."""
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
        reference_json = json.dumps(reference)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{where}: {columns.reference} is not a JSON value: {error}"
        ) from None
    answer = _value(where, values, "answer", columns.answer) if columns.answer else ""
    if not isinstance(answer, str):
        raise ConfigurationError(f"{where}: {columns.answer} must be text, got {_shown(answer)}")
    return DatasetRow(place, prompt, reference_json, answer)


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


_NAMED_MAX = 5  # most rows that an error message names
_WHERE = "task.options of dataset"


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Holds `task.options` of this task. `path` is the file. `verifier` names a function as
    `module:function`; it returns a reward, or a pair of a reward and named scores. `prompt`,
    `reference` and `answer` name columns; answers are used by the warm-up alone.

    `held_out` is a second file, whose rows are kept out of training, for evaluation. Without one,
    about `held_out_share` of the rows of the first file are kept out.
    """

    path: str
    verifier: str
    prompt: str = "prompt"
    reference: str = "reference"
    answer: str = ""
    held_out: str = ""
    held_out_share: float = 0.1


class Dataset:
    """Implements `Task` and `Teacher` (`base.py`) over the rows of one or two files, which are read
    when the first prompt or document is requested. Each epoch is a new permutation of the training
    rows. `text` converts texts to tokens and back.
    """

    name = "dataset"
    Options = DatasetOptions
    path_options = ("path", "held_out")

    def __init__(self, text: TaskText, options: DatasetOptions) -> None:
        self._text, self._path, self._share = text, Path(options.path), options.held_out_share
        if not 0 < self._share < 1:
            raise ConfigurationError(
                f"{_WHERE}: held_out_share = {self._share} must lie between 0 and 1"
            )
        self._held_out_path = Path(options.held_out) if options.held_out else None
        self._columns = DatasetColumns(options.prompt, options.reference, options.answer)
        self._verify = cast(
            Callable[[str, object], object],
            find_callable(options.verifier, "task.options.verifier"),
        )

    @property
    def stop(self) -> tuple[int, ...]:
        return self._text.stop

    def tokenizer(self) -> TextTokenizer:
        return self._text.tokenizer

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        """Returns the prompt at `position` of the order of training rows that `seed` determines."""
        rows = self._splits[0]
        epoch, index = shuffled(len(rows), seed, position)
        return self._make_prompt(rows[index], epoch)

    def held_out(self, count: int) -> list[TaskPrompt]:
        """Returns the prompts of the first `count` held-out rows; raises `ConfigurationError` if
        there are fewer.
        """
        rows = self._splits[1]
        if count > len(rows):
            raise ConfigurationError(
                f"evaluation.prompts: {count} asked for, the data set holds out {len(rows)}; ask "
                "for no more, raise held_out_share, or name a file as task.options.held_out"
            )
        return [self._make_prompt(row, 0) for row in rows[:count]]

    def documents(self, seed: int, count: int) -> list[Document]:
        """Returns `count` warm-up documents: prompts and answers of training rows, drawn with
        repetition. Raises `ConfigurationError` if no column of answers is named.
        """
        if not self._columns.answer:
            raise ConfigurationError(
                f"{_WHERE}: a warm-up needs answers to learn: name their column as "
                "task.options.answer, or set model.path to a checkpoint to start from"
            )
        rows = self._splits[0]
        chosen: list[int] = np.random.default_rng(seed).integers(len(rows), size=count).tolist()
        return [
            Document(self._text.prompt(row.prompt), self._text.response(row.answer))
            for row in (rows[index] for index in chosen)
        ]

    def judge(self, reference: str, turns: Turns) -> Score:
        """Returns the score that the user's verifier gives to the answer, the last of `turns`.
        Raises `TypeError` for a tuple that is no pair (reward, scores), and any error of the
        verifier.
        """
        given = self._verify(self._text.answer(turns), json.loads(reference))
        if isinstance(given, Score):
            return given
        if not isinstance(given, tuple):
            return Score(cast(float, given))  # the caller reports a result that is not a number
        pair = cast(tuple[object, ...], given)
        if len(pair) != 2 or not isinstance(pair[1], Mapping):
            raise TypeError(f"the verifier returned {given!r}, not a reward or (reward, scores)")
        return Score(cast(float, pair[0]), cast(Mapping[str, float], pair[1]))

    @cached_property
    def _splits(self) -> tuple[list[DatasetRow], list[DatasetRow]]:
        """The training rows and the held-out rows. Held-out rows are those of the second file, or a
        fixed share of the first one. Raises `ConfigurationError` if a prompt is in both, if one is
        too long for the context, or if no training row is left.
        """
        rows = read_rows(self._path, self._columns)
        self._refuse_longer(self._path, rows)
        if self._held_out_path is not None:
            held_out = read_rows(self._held_out_path, self._columns)
            self._refuse_longer(self._held_out_path, held_out)
            self._refuse_shared(rows, held_out)
            return rows, held_out
        training = [row for row in rows if not self._is_held_out(row)]
        if not training:
            raise ConfigurationError(
                f"data set {self._path}: all {len(rows)} rows are held out; lower held_out_share "
                "or add rows"
            )
        return training, [row for row in rows if self._is_held_out(row)]

    def _is_held_out(self, row: DatasetRow) -> bool:
        """Returns whether the row is held out, which depends on a hash of its prompt alone: rows
        with equal prompts are either all held out or all trained on, also after rows are added.
        """
        return xxhash.xxh3_64_intdigest(row.question_key.encode()) < self._share * 2**64

    def _refuse_shared(self, rows: list[DatasetRow], held_out: list[DatasetRow]) -> None:
        known = {row.question_key for row in rows}
        shared = [row.place for row in held_out if row.question_key in known]
        if shared:
            raise ConfigurationError(
                f"data set {self._held_out_path}: {len(shared)} held-out prompts are in "
                f"{self._path} too ({_named(shared)}); take them out of one of the files"
            )

    def _refuse_longer(self, path: Path, rows: list[DatasetRow]) -> None:
        longer = [
            f"{row.place} with {len(tokens)} tokens"
            for row in rows
            if not self._text.surely_fits(row.prompt)
            and not self._text.fits(tokens := self._tokens(row, path))
        ]
        if longer:
            raise ConfigurationError(
                f"data set {path}: {len(longer)} of {len(rows)} prompts are longer than the "
                f"{self._text.prompt_tokens_max} tokens that rollouts.context_max − "
                f"sampling.tokens_max leaves: {_named(longer)}; change these settings or take "
                "the rows out"
            )

    def _tokens(self, row: DatasetRow, path: Path) -> tuple[int, ...]:
        try:
            return self._text.prompt(row.prompt)
        except ConfigurationError as error:
            raise ConfigurationError(f"data set {path}, {row.place}: {error}") from error

    def _make_prompt(self, row: DatasetRow, epoch: int) -> TaskPrompt:
        return TaskPrompt(self._tokens(row, self._path), row.reference, epoch)


def _named(places: list[str]) -> str:
    more = len(places) - _NAMED_MAX
    return ", ".join(places[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
