"""Reads a data set's rows as prompts. A few unusable rows are skipped, each by its place; more than
one in a hundred end the run, because then the file or an option is wrong.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rollstream.errors import ConfigurationError
from rollstream.import_path import nearest
from rollstream.printable import printable
from rollstream.producers.rows.row_files import (
    RowFault,
    RowSampling,
    column_value,
    read_file_rows,
    shown,
)
from rollstream.producers.tasks.text import PromptContent
from rollstream.storage.skipped_rows import NAMED_MAX as RECORDED_MAX, SkippedRecord
from rollstream.streams.foreign_text import ForeignValueRefused, clean_json, joined_parts

SKIPPED_SHARE = 100
"""At most one row in so many is skipped."""
REFERENCE_BYTES_MAX = 12 << 20  # of the 16 MiB of a record, which has the prompt's tokens too
NAMED_MAX = 20  # most rows that an error message or a log names
_HOPELESS = 1000  # bad rows after which a file with nothing else is not read to its end
_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")


@dataclass(frozen=True, slots=True)
class DatasetColumns:
    """A column named "" is not read; `where` is the table of these options, for messages."""

    prompt: str
    reference: str
    answer: str
    where: str = "task.options"

    @property
    def names(self) -> list[str]:
        return [name for name in (self.prompt, self.reference, self.answer) if name]

    @property
    def of_held_out(self) -> "DatasetColumns":
        """The columns of files of held-out rows, which nothing is warmed up on."""
        return replace(self, answer="")


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A row at a `place` such as "line 7". `reference` is JSON text, "null" without one; `answer`
    is "" without one.
    """

    path: Path
    place: str
    prompt: PromptContent
    reference: str
    answer: str

    @property
    def question_key(self) -> str:
        return json.dumps(self.prompt, sort_keys=True)

    def fault(self, reason: str) -> RowFault:
        return RowFault(self.path, self.place, reason)


@dataclass(slots=True)
class SkippedRows:
    """Unusable rows by their places; `rows` counts all rows that were read."""

    name: str
    rows: int = 0
    faults: dict[tuple[Path, str], RowFault] = field(
        default_factory=dict[tuple[Path, str], RowFault]
    )
    shared: int = 0
    """Held-out rows among them that are trained on: left out, and not bad."""

    def __contains__(self, row: DatasetRow) -> bool:
        return bool(self.faults) and (row.path, row.place) in self.faults

    def add(self, fault: RowFault) -> None:
        self.faults[fault.path, fault.place] = fault

    def add_shared(self, row: DatasetRow, where: str) -> None:
        """Leaves out a held-out row whose prompt is trained on in the files `where`."""
        self.add(row.fault(f"its prompt is in {where} too"))
        self.shared += 1

    @property
    def bad(self) -> int:
        return len(self.faults) - self.shared

    def check(self) -> None:
        """Raises `ConfigurationError`, which lists the first bad rows, if more than one in
        `SKIPPED_SHARE` is bad.
        """
        count = self.bad
        if count * SKIPPED_SHARE > self.rows:
            raise ConfigurationError(
                f"data set {self.name}: {count} of {self.rows} rows cannot be used (at most one in "
                f"{SKIPPED_SHARE} is skipped):\n{self.listed()}\nmend these rows or take them out"
            )

    def listed(self, causes_max: int = NAMED_MAX) -> str:
        """Returns one cause a line, with the first places of each."""
        causes = grouped_faults(list(self.faults.values()))
        lines = [f"  {cause}" for cause in causes[:causes_max]]
        if len(causes) > causes_max:
            lines.append(f"  and {len(causes) - causes_max} more causes")
        return "\n".join(lines)

    def record(self) -> SkippedRecord:
        faults = list(self.faults.values())
        fault_texts = tuple(printable(str(fault)) for fault in faults[:RECORDED_MAX])
        return SkippedRecord(self.name, self.rows, len(faults), fault_texts)

    @property
    def is_hopeless(self) -> bool:
        return len(self.faults) >= _HOPELESS and 2 * len(self.faults) > self.rows


def grouped_faults(faults: Sequence[RowFault]) -> list[str]:
    """Returns a text for each file and cause, in the order of their first rows. Causes that differ
    in numbers and quoted values alone are one.
    """
    groups: dict[tuple[Path, str], list[RowFault]] = {}
    for fault in faults:
        groups.setdefault((fault.path, _VARYING.sub("", fault.reason)), []).append(fault)
    texts: list[str] = []
    for first, *others in groups.values():
        if len(others) < 2:
            texts += [str(first), *map(str, others)]
            continue
        places = ", ".join(fault.place for fault in others[:PLACES_MAX])
        more = f" and {len(others) - PLACES_MAX:,} more" if len(others) > PLACES_MAX else ""
        texts.append(f"{first}; likewise {places}{more}")
    return texts


PLACES_MAX = 4  # of one cause that are named behind the first
_VARYING = re.compile(r"""[0-9]+|'[^']*'|"[^"]*\"""")


def read_rows(
    files: Sequence[Path],
    columns: DatasetColumns,
    skipped: SkippedRows,
    sampling: RowSampling | None = None,
) -> Iterator[DatasetRow]:
    """Yields the rows in their order, or those that `sampling` chooses; the others go to `skipped`.
    Raises `ConfigurationError` for an unreadable file.
    """
    for path in files:
        for raw in read_file_rows(path, columns.names, sampling):
            skipped.rows += 1
            row = raw if isinstance(raw, RowFault) else _row(path, *raw, columns)
            if isinstance(row, DatasetRow):
                yield row
                continue
            skipped.add(row)
            if skipped.is_hopeless:
                return


class _Unusable(ValueError):
    """Raised for a value that makes its row unusable; the message names the reason."""


def _row(
    path: Path, place: str, values: Mapping[str, Any], columns: DatasetColumns
) -> DatasetRow | RowFault:
    try:
        prompt_value = _value(values, f"{columns.where}.prompt", columns.prompt)
        prompt = _prompt_content(columns.prompt, prompt_value)
        reference = None
        if columns.reference:
            reference = _value(values, f"{columns.where}.reference", columns.reference)
        answer = _value(values, f"{columns.where}.answer", columns.answer) if columns.answer else ""
        if isinstance(answer, int) and not isinstance(answer, bool):
            answer = str(answer)
        if not isinstance(answer, str):
            raise _Unusable(f"{columns.answer} must be text or a whole number, got {shown(answer)}")
        return DatasetRow(
            path, place, prompt, _json_text(columns.reference, reference),
            _utf8(columns.answer, answer),
        )  # fmt: skip
    except _Unusable as error:
        return RowFault(path, place, str(error))
    except RecursionError:
        return RowFault(path, place, "lists and objects are nested too deeply")


def _value(values: Mapping[str, Any], option: str, column: str) -> Any:
    for value in column_value(values, column):
        return value
    hint = nearest(column, values) or f"; it has {', '.join(sorted(values)) or 'none'}"
    raise _Unusable(f"no column {column!r} ({option}){hint}")


def _json_text(column: str, reference: object) -> str:
    try:
        text = json.dumps(reference, default=_refuse_type)
    except _NoJson as error:
        raise _Unusable(
            f"{column} is not a JSON value: it holds a {error}; write the column as text or "
            "numbers (in Parquet: cast it to string), or name another column"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise _Unusable(f"{column} is not a JSON value: {error}") from None
    if len(text) > REFERENCE_BYTES_MAX:
        raise _Unusable(
            f"{column} has {len(text):,} bytes, and a record has room for {REFERENCE_BYTES_MAX:,}: "
            "store it elsewhere, and its place here"
        )
    # JSON text is ASCII, so a text that UTF-8 cannot carry would first show in the verifier.
    if "\\ud" in text:
        _refuse_halves(column, json.loads(text))
    return text


class _NoJson(TypeError):
    """Raised for a value, such as a time, that JSON does not have; the message is its type."""


def _refuse_type(value: object) -> object:
    raise _NoJson(type(value).__name__)


def _refuse_halves(column: str, value: object) -> None:
    if isinstance(value, str):
        _utf8(column, value)
    elif isinstance(value, list):
        for item in cast(list[object], value):
            _refuse_halves(column, item)
    elif isinstance(value, dict):
        for name, item in cast(dict[str, object], value).items():
            _refuse_halves(column, name)
            _refuse_halves(column, item)


def _utf8(column: str, text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Unusable(
            f"{column} has half of a surrogate pair, which UTF-8 cannot carry, at character "
            f"{error.start} ({text[error.start]!r})"
            if not "\udc80" <= text[error.start] <= "\udcff"
            else f"{column} has a byte that is not UTF-8 at character {error.start} "
            f"(0x{ord(text[error.start]) - 0xDC00:02x}): save the file as UTF-8"
        ) from None
    return text


def _prompt_content(column: str, value: Any) -> PromptContent:
    if isinstance(value, str) and value:
        value = _written_messages(column, value)
        if isinstance(value, str):
            return _utf8(column, value)
    requirement = f"{column} must be text or a list of chat messages"
    if value == "":
        raise _Unusable(f"{requirement}, and it is empty")
    if not isinstance(value, list) or not value:
        raise _Unusable(f"{requirement}, got {shown(cast(object, value))}")
    messages = [_joined_message(column, message) for message in cast(list[Any], value)]
    for message in messages:
        if not _is_message(message):
            raise _Unusable(f"{requirement} with role and content, got {shown(message)}")
    if messages[-1]["role"] == "assistant":
        raise _Unusable(
            f"the last message of {column} is the assistant's: there is nothing to answer"
        )
    _refuse_halves(column, messages)
    try:
        return [
            {key: clean_json(message[key]) for key in _MESSAGE_KEYS if message.get(key) is not None}
            for message in messages
        ]
    except ForeignValueRefused as error:
        raise _Unusable(f"{requirement}: {error}") from None


_PYTHONS = re.compile(r"\s*\[\s*\{\s*'(role|content)'\s*:")
_JSONS = re.compile(r'\s*\[\s*\{\s*"')


def _written_messages(column: str, text: str) -> object:
    if _PYTHONS.match(text):
        raise _Unusable(
            f"{column} holds chat messages as Python prints them: write them as JSON (json.dumps)"
        )
    # JSON is the only form in which a table (CSV) holds messages.
    if not _JSONS.match(text):
        return text
    try:
        messages: object = json.loads(text)
    except ValueError:
        return text
    listed = cast(list[object], messages) if isinstance(messages, list) else []
    is_chat = all(isinstance(message, dict) and "role" in message for message in listed)
    return listed if is_chat and listed else text


def _joined_message(column: str, message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    fields = cast(dict[str, Any], message)
    content = fields.get("content")
    if not isinstance(content, list):
        return fields
    try:
        return {**fields, "content": joined_parts(cast(list[object], content))}
    except ForeignValueRefused as error:
        raise _Unusable(f"{column}: {error}") from None


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    message = cast(dict[str, Any], value)
    has_text = isinstance(message.get("content"), str)
    has_calls = isinstance(message.get("tool_calls"), list) and bool(message["tool_calls"])
    return isinstance(message.get("role"), str) and (has_text or has_calls)
