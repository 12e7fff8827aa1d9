"""Reads the records of CSV and TSV text (`CsvTable`), as spreadsheets and programs write it."""

import csv
import re
from collections.abc import Iterator
from typing import TextIO

FIELD_CHARACTERS_MAX = 1 << 27  # of a CSV field; csv's own limit of 131 072 is below a long prompt
_QUOTED = re.compile(r'"[^"]*"')
_DELIMITERS = (";", "\t", ",")  # spreadsheets write ; where the comma is the decimal mark


class CsvTable:
    """Iterates over the records, each with the number of its first line; an error stands for a line
    that is no record.
    """

    def __init__(self, text: TextIO, delimiter: str) -> None:
        csv.field_size_limit(FIELD_CHARACTERS_MAX)
        first, self._number = text.readline(), 2
        if (separator := _stated_separator(first)) is not None:
            delimiter, first, self._number = separator, text.readline(), 3
        elif delimiter not in (outside := _QUOTED.sub("", first)):
            delimiter = next((other for other in _DELIMITERS if other in outside), delimiter)
        names = csv.reader([first], delimiter=delimiter)
        written = [name for line in names for name in line]
        self.header = [name.strip() for name in written]
        # A header `a, b` means values without the space, too.
        self._is_spaced = len(written) > 1 and all(name.startswith(" ") for name in written[1:])
        self._text, self._delimiter = text, delimiter
        self._again: list[str] = []  # in reverse
        self._taken: list[str] = []

    def __iter__(self) -> Iterator[tuple[int, list[str] | csv.Error]]:
        lines, is_spaced = self._lines(), self._is_spaced
        reader = csv.reader(
            lines, delimiter=self._delimiter, strict=True, skipinitialspace=is_spaced
        )
        while True:
            self._taken = []
            try:
                fields = next(reader, None)
            except csv.Error as error:
                # A quote that is never closed, or closed by the begin of another one, takes all
                # lines up to there into one field. Only its own line is at fault: the lines after
                # it are read again.
                fields = self._cut_at_tabs(error)
                self._again += reversed(self._taken[1:])
                del self._taken[1:]
            if fields is None:
                return
            yield self._number, fields
            self._number += len(self._taken)

    def _cut_at_tabs(self, error: csv.Error) -> list[str] | csv.Error:
        # A line of tabs may have quotes that quote nothing.
        fields = self._taken[0].rstrip("\r\n").split("\t") if self._delimiter == "\t" else []
        return fields if len(fields) > 1 else error

    def _lines(self) -> Iterator[str]:
        while line := self._again.pop() if self._again else self._text.readline():
            self._taken.append(line)
            yield line


def _stated_separator(line: str) -> str | None:
    # Excel states its separator in a first line `sep=;`.
    text = line.rstrip("\r\n").strip('"')
    return text[4] if len(text) == 5 and text[:4].lower() == "sep=" else None
