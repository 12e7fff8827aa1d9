"""Reads all rows of a small data set, a bounded sample of a large one. No bound is a time, so equal
files give equal figures.
"""

from collections.abc import Iterable, Iterator
from math import sqrt

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.producers.rows.data_files import data_files
from rollstream.producers.rows.row_files import RowSampling
from rollstream.producers.tasks.dataset import Dataset
from rollstream.producers.tasks.dataset_rows import (
    SKIPPED_SHARE,
    DatasetColumns,
    SkippedRows,
    grouped_faults,
    read_rows,
)

WHOLE_BYTES_MAX = 8 << 20
"""Files of at most so many bytes together are read whole: some 40 000 questions."""
PACKED_BYTES_MAX = 2 << 20  # of compressed ones
COUNTED_ROWS = 512
"""So many rows are rendered and their tokens counted: those with the longest texts."""
FAULTS_MAX = 5  # causes that are named
_SIGMAS = 6  # a held-out share that was not counted is above its mean less so many deviations


class LongPrompt(msgspec.Struct, frozen=True):
    tokens: int
    place: str
    is_held_out: bool = False


def sort_prompts(prompts: Iterable[LongPrompt]) -> list[LongPrompt]:
    return sorted(prompts, key=lambda prompt: (-prompt.tokens, prompt.place))


class DatasetSurvey(msgspec.Struct, frozen=True):
    """`rows` is the number of all rows, or at least that without `is_counted`; of the `sampled`
    ones `faults` cannot be used, which end the run if they are `too_many`. `shared` held-out ones
    are trained on and left out; `held_out` prompts or more are there for an evaluation.
    """

    name: str
    rows: int
    is_counted: bool
    sampled: int
    held_out: int
    faults: int
    too_many: bool
    shared: int
    named: list[str]
    longest: list[LongPrompt]
    reference: str
    largest_token: int

    @property
    def is_whole(self) -> bool:
        return self.sampled == self.rows


def survey_dataset(task: Dataset) -> DatasetSurvey:
    """Returns the survey. Raises `ConfigurationError` for files that cannot be used at all."""
    parts = [_Part(task, task.options.path, task.columns)]
    usable, is_whole = parts[0].usable, parts[0].sampled == parts[0].rows
    if not task.options.held_out:
        if is_whole and usable and all(map(task.is_held_out, usable)):
            raise task.nothing_to_train(len(usable))
    else:
        parts.append(_Part(task, task.options.held_out, task.columns.of_held_out))
        parts[1].drop_shared(parts[0])
    faults = [fault for part in parts for fault in part.skipped.faults.values()]
    causes = grouped_faults(faults)
    more = len(causes) - FAULTS_MAX
    first = next((row for part in parts for row in part.usable), None)
    return DatasetSurvey(
        name=" and ".join(part.skipped.name for part in parts),
        rows=sum(part.rows for part in parts),
        is_counted=not any(part.sampling.has_ended for part in parts),
        sampled=sum(part.sampled for part in parts),
        held_out=_held_out_count(task, parts[0], parts[-1]),
        faults=sum(part.skipped.bad for part in parts),
        too_many=any(part.has_too_many for part in parts),
        shared=sum(part.skipped.shared for part in parts),
        named=causes[:FAULTS_MAX] + ([f"and {more} more causes"] if more > 0 else []),
        longest=sort_prompts(prompt for part in parts for prompt in part.longest),
        reference="null" if first is None else first.reference,
        largest_token=max(part.largest_token for part in parts),
    )


def _held_out_count(task: Dataset, training: "_Part", held_out: "_Part") -> int:
    if held_out is not training:
        return held_out.rows - held_out.sampled + len(held_out.usable)
    seen = sum(map(task.is_held_out, training.usable))
    # At least so many are expected among the rows that were not read.
    expected = (training.rows - training.sampled) * task.options.held_out_share
    return seen + max(0, int(expected - _SIGMAS * sqrt(expected)))


class _Part:
    def __init__(self, task: Dataset, option: str, columns: DatasetColumns) -> None:
        files = data_files(option)
        packed = sum(path.stat().st_size for path in files if path.suffix in (".gz", ".zst"))
        size = sum(path.stat().st_size for path in files)
        is_small = size <= WHOLE_BYTES_MAX and packed <= PACKED_BYTES_MAX
        self.skipped, self.sampling = SkippedRows(option), RowSampling()
        sampling = None if is_small else self.sampling
        self.usable = list(read_rows(files, columns, self.skipped, sampling))
        self.sampled = self.skipped.rows
        self.rows = self.sampled if is_small else self.sampling.rows
        if not self.rows:
            raise ConfigurationError(f"data set {option} is empty: there is nothing to ask")
        self.largest_token = 0
        self.longest = list(self._render(task, option))
        self.usable = [row for row in self.usable if row not in self.skipped]

    @property
    def has_too_many(self) -> bool:
        # Enough to end a run, whatever the other rows are.
        bad = self.skipped.bad
        return bad * SKIPPED_SHARE > self.rows or 2 * bad > self.sampled

    def drop_shared(self, training: "_Part") -> None:
        keys = {row.question_key for row in training.usable}
        for row in self.usable:
            if row.question_key in keys:
                self.skipped.add_shared(row, training.skipped.name)
        self.usable = [row for row in self.usable if row not in self.skipped]

    def _render(self, task: Dataset, option: str) -> Iterator[LongPrompt]:
        other = task.options.held_out
        rendered: set[tuple[int, ...]] = set()
        sizes = sorted(self.usable, key=lambda row: len(row.question_key), reverse=True)
        for row in sizes[:COUNTED_ROWS]:
            try:
                tokens = task.row_tokens(row)
                self.largest_token = max(self.largest_token, *tokens)
            except ConfigurationError as error:
                self.skipped.add(row.fault(str(error)))
                continue
            is_held_out = option == other if other else task.is_held_out(row)
            yield LongPrompt(len(tokens), f"{row.path}, {row.place}", is_held_out)
            rendered.add(tokens)
        questions = {" ".join(row.question_key.split()) for row in sizes[:COUNTED_ROWS]}
        if len(rendered) == 1 < len(questions):
            raise ConfigurationError(
                f"{task.tokenizer().where}: the chat template gives the {len(questions)} longest "
                f"prompts of {option} the same tokens: it leaves the messages out (task.template)"
            )
