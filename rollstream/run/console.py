"""The console of commands; control characters in another user's text are escaped. A terminal gets
output of its width; a pipe or file everything, a table's row as cells separated by tabs.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from rollstream.look.query.output import tab_separated
from rollstream.printable import printable, raw_stream

# More than any text has, so that nothing is wrapped or cut.
PIPE_COLUMNS = 1 << 20


class TerminalConsole(Console):
    """Takes no text for markup or names of emoji. Its own colours and cursor movements bypass the
    escaping.
    """

    def __init__(self, *, stderr: bool = False, highlight: bool = True) -> None:
        stream = raw_stream(sys.stderr if stderr else sys.stdout)
        # FORCE_COLOR, as services of continuous integration set it, asks for colours and makes no
        # pipe a terminal, into which frames could be drawn.
        forced = not stream.isatty() and bool(os.environ.get("FORCE_COLOR"))
        super().__init__(
            file=stream,
            stderr=stderr,
            highlight=highlight,
            markup=False,
            emoji=False,
            force_terminal=None if stream.isatty() else False,
            color_system="standard" if forced else "auto",
        )

    @property
    def size(self) -> ConsoleDimensions:
        """A pipe has room for everything."""
        at = super().size
        return at if self.file.isatty() else ConsoleDimensions(PIPE_COLUMNS, at.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self.width, self.height = new_size

    @property
    def redraws(self) -> bool:
        """A pipe and `TERM=dumb` cannot redraw a frame."""
        return self.is_terminal and not self.is_dumb_terminal

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, Table) and not (self.file.isatty() or _is_layout(renderable)):
            # As text, rich would replace its tabs.
            for line in _table_lines(renderable):
                yield Segment(f"{printable(line)}\n")
            return
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control is None and (safe := printable(text)) != text:
                yield Segment(safe, segment.style)
            else:
                yield segment


def _is_layout(table: Table) -> bool:
    # Such a table only places other blocks.
    return table.box is None and not table.show_header


def _table_lines(table: Table) -> Iterator[str]:
    if table.title:
        yield _plain(table.title)
    if table.show_header:
        yield tab_separated([_plain(column.header) for column in table.columns])
    for row in zip_longest(*(_cells(column) for column in table.columns), fillvalue=""):
        yield tab_separated(row)


def _cells(column: Column) -> list[str]:
    return [_plain(cell) for cell in column.cells]


def _plain(cell: RenderableType) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
