"""The task `dataset`: prompts from files, rewards by a user's function `verifier(answer,
reference)` (docs/reference/tasks.md). They must not change during a run: prompts are found by their
place in them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import iscoroutinefunction
from threading import Event
from typing import cast

import numpy as np
import xxhash

from rollstream.errors import ConfigurationError, TooFewHeldOut
from rollstream.import_path import find_function
from rollstream.producers.dialogue.template_messages import ToolSchema
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.rows.data_files import data_files
from rollstream.producers.rows.row_files import shown
from rollstream.producers.tasks.base import (
    Document,
    Score,
    TaskPrompt,
    Turns,
    UnusableScore,
    shuffled,
)
from rollstream.producers.tasks.dataset_rows import (
    DatasetColumns,
    DatasetRow,
    SkippedRows,
    read_rows,
)
from rollstream.producers.tasks.text import TaskText
from rollstream.storage.skipped_rows import SkippedRecord

_CHECK_EVERY = 1000  # rows between two looks at whether too many are too long


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """`verifier` (`module:function`) returns a reward, or a pair of a reward and named scores;
    without one no answer can be judged, as where a scorer gives the rewards. `held_out` names files
    as `path` does, kept for evaluation; without it about `held_out_share` of the rows are.
    """

    path: str
    verifier: str = ""
    prompt: str = "prompt"
    reference: str = "reference"
    answer: str = ""
    held_out: str = ""
    held_out_share: float = 0.1


@dataclass(frozen=True, slots=True)
class DatasetSplit:
    """The usable rows, for training and for evaluation, and those that are skipped."""

    training: list[DatasetRow]
    held_out: list[DatasetRow]
    skipped: tuple[SkippedRows, ...]


class Dataset:
    """Implements `Task` and `Teacher` over the rows of files. Each epoch is a new permutation of
    the training rows.

    A row that cannot be read, rendered or that is too long is skipped: the next row stands in its
    place. That depends on the files and settings alone, so the order is the same in every process.
    """

    name = "dataset"
    Options = DatasetOptions
    path_options = ("path", "held_out")

    def __init__(self, text: TaskText, options: DatasetOptions) -> None:
        self._text, self.options, self._share = text, options, options.held_out_share
        self._where = text.options_where
        if not 0 <= self._share < 1:
            raise ConfigurationError(
                f"{self._where} of dataset: held_out_share must be at least 0 (nothing is held "
                f"out) and below 1, got {self._share}"
            )
        self.columns = DatasetColumns(
            options.prompt, options.reference, options.answer, self._where
        )
        self._verify = (
            _find_verifier(options.verifier, f"{self._where}.verifier")
            if options.verifier
            else None
        )

    @property
    def stop(self) -> tuple[int, ...]:
        return self._text.stop

    def _tools(self) -> Sequence[ToolSchema]:
        # A task with tools has some.
        return ()

    def tokenizer(self) -> TextTokenizer:
        return self._text.tokenizer

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        rows = self._split.training
        epoch, index = shuffled(len(rows), seed, position)
        row, tokens = self._usable_from(index)
        return TaskPrompt(tokens, row.reference, epoch)

    def held_out(self, count: int) -> list[TaskPrompt]:
        prompts: list[TaskPrompt] = []
        for row in self._split.held_out:
            if len(prompts) == count:
                break
            tokens = self._usable_tokens(row, self._split.skipped[-1])
            if tokens is None:
                self._split.skipped[-1].check()
            else:
                prompts.append(TaskPrompt(tokens, row.reference))
        if len(prompts) < count:
            raise TooFewHeldOut(
                f"evaluation.prompts: {count} asked for, the data set holds out {len(prompts)}; "
                f"ask for no more, raise {self._where}.held_out_share, or name a file as "
                f"{self._where}.held_out",
                len(prompts),
            )
        return prompts

    def documents(self, seed: int, count: int) -> list[Document]:
        """Returns prompts and answers of training rows, drawn with repetition. Raises
        `ConfigurationError` without a column of answers.
        """
        self.check_documents()
        rows = self._split.training
        chosen: list[int] = np.random.default_rng(seed).integers(len(rows), size=count).tolist()
        usable = (self._usable_from(index) for index in chosen)
        return [Document(tokens, self._text.response(row.answer)) for row, tokens in usable]

    def check_documents(self) -> None:
        if not self.columns.answer:
            raise ConfigurationError(
                f"{self._where} of dataset: a warm-up needs answers to learn: name their column "
                f"as {self._where}.answer, or set model.path to a checkpoint to start from"
            )

    def judge(self, reference: str, turns: Turns) -> Score:
        """Returns the verifier's score of the last of `turns`. Raises `UnusableScore` for a tuple
        that is no pair (reward, scores), any error of the verifier, and `ConfigurationError`
        without one.
        """
        if self._verify is None:
            raise ConfigurationError(
                f"{self._where} of {self.name}: give verifier, or no answer can be judged"
            )
        verdict = self._verify(self._text.answer(turns), json.loads(reference))
        if isinstance(verdict, Score):
            return verdict
        if not isinstance(verdict, tuple):
            return Score(cast(float, verdict))  # the caller reports a result that is not a number
        pair = cast(tuple[object, ...], verdict)
        if len(pair) != 2 or not isinstance(pair[1], Mapping):
            raise UnusableScore(
                f"the verifier returned {shown(pair)}, not a reward or (reward, scores), where "
                "scores are a dict of numbers by name"
            )
        return Score(cast(float, pair[0]), cast(Mapping[str, float], pair[1]))

    def nothing_to_train(self, rows: int) -> ConfigurationError:
        return ConfigurationError(
            f"data set {self.options.path}: all {rows} rows are held out; lower held_out_share or "
            "add rows"
        )

    def row_tokens(self, row: DatasetRow) -> tuple[int, ...]:
        """Returns the tokens of the row's prompt. Raises `ConfigurationError` if the chat template
        refuses it.
        """
        return self._text.prompt(row.prompt, self._tools())

    def check_turns(self) -> None:
        """Raises `ConfigurationError` if the chat template cannot continue a dialogue."""
        self._text.reply([{"role": "user", "content": "?"}])

    def read_rows(self) -> None:
        assert self._split.training

    def skipped_rows(self) -> list[SkippedRecord]:
        is_read = "_split" in self.__dict__
        return [skipped.record() for skipped in self._split.skipped] if is_read else []

    def count_long_rows(self, stop: Event) -> None:
        split = self._split
        limit = self._text.prompt_tokens_max
        if limit is None:
            return
        for rows, skipped in ((split.training, split.skipped[0]),
                              (split.held_out, split.skipped[-1])):  # fmt: skip
            sizes = ((self._likely_tokens(row), place) for place, row in enumerate(rows))
            suspects = sorted((pair for pair in sizes if pair[0] > limit), reverse=True)
            for number, (_, place) in enumerate(suspects):
                if stop.is_set():
                    return
                self._usable_tokens(rows[place], skipped)
                if number % _CHECK_EVERY == 0:
                    skipped.check()
            skipped.check()

    def _likely_tokens(self, row: DatasetRow) -> int:
        try:
            likely = None if self._tools() else self._text.likely_tokens_max(row.prompt)
        except ConfigurationError:  # the template refuses the roles of this row
            likely = None
        # Unknown: more than any limit.
        return 1 << 62 if likely is None else likely

    @cached_property
    def _split(self) -> DatasetSplit:
        files = data_files(self.options.path)
        skipped = SkippedRows(self.options.path)
        rows = list(read_rows(files, self.columns, skipped))
        _check_read(skipped)
        if self.options.held_out:
            held_out, others = self._second_files(rows)
            return DatasetSplit(rows, held_out, (skipped, others))
        split: tuple[list[DatasetRow], list[DatasetRow]] = ([], [])
        for row in rows:
            split[self.is_held_out(row)].append(row)
        if not split[0]:
            raise self.nothing_to_train(len(rows))
        return DatasetSplit(*split, (skipped,))

    def _second_files(self, training: list[DatasetRow]) -> tuple[list[DatasetRow], SkippedRows]:
        skipped = SkippedRows(self.options.held_out)
        keys = {row.question_key for row in training}
        held_out: list[DatasetRow] = []
        files, columns = data_files(self.options.held_out), self.columns.of_held_out
        for row in read_rows(files, columns, skipped):
            if row.question_key in keys:
                # A row that is trained on is not held out.
                skipped.add_shared(row, self.options.path)
            else:
                held_out.append(row)
        _check_read(skipped)
        return held_out, skipped

    def is_held_out(self, row: DatasetRow) -> bool:
        # By a hash of the prompt alone: rows with equal prompts stay together, also after rows are
        # added.
        return xxhash.xxh3_64_intdigest(row.question_key.encode()) < self._share * 2**64

    def _usable_from(self, index: int) -> tuple[DatasetRow, tuple[int, ...]]:
        rows, skipped = self._split.training, self._split.skipped[0]
        for place in range(index, index + len(rows)):
            row = rows[place % len(rows)]
            tokens = self._usable_tokens(row, skipped)
            if tokens is not None:
                return row, tokens
            skipped.check()
        raise AssertionError("SkippedRows.check raises before every row is unusable")

    def _usable_tokens(self, row: DatasetRow, skipped: SkippedRows) -> tuple[int, ...] | None:
        if row in skipped:
            return None
        try:
            tokens = self.row_tokens(row)
            reason = self._text.length_fault(tokens)
        except ConfigurationError as error:
            tokens, reason = (), str(error)
        if not reason:
            return tokens
        skipped.add(row.fault(reason))
        return None


def _find_verifier(path: str, setting: str) -> Callable[[str, object], object]:
    verify = find_function(path, setting, ("answer", "reference"))
    if iscoroutinefunction(verify):
        raise ConfigurationError(
            f"{setting} = {path!r} is an `async def`; a verifier returns its reward"
        )
    return cast(Callable[[str, object], object], verify)


def _check_read(skipped: SkippedRows) -> None:
    if not skipped.rows:
        raise ConfigurationError(f"data set {skipped.name} is empty: there is nothing to ask")
    skipped.check()
