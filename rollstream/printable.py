"""Makes text safe for a terminal (`printable`), and everything that a command prints
(`printable_output`). A record, a prompt, an answer, a reward's error or a file's name is text of
another user: an escape sequence in it could rewrite lines, hide text, or type into the terminal.

All control characters but line breaks and tabs become visible escapes of the form that JSON has,
also where the output is no terminal: a file is looked at later.

What a stream cannot take ends no work (`OutputStream`): characters that its encoding lacks are
replaced, and a stream that is gone (a closed pipe or terminal, a full disk) raises `OutputLost`,
which ends a command that only looks, or drops its text (`outlast_output`).
"""

import codecs
import errno
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rollstream.errors import OutputLost

_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters of ASCII and Latin-1 but \t and \n
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they reorder the text beside them
    "\u2028\u2029\ufeff\ud800-\udfff]"  # line breaks of some programs; halves of characters
)


def printable(text: str) -> str:
    """Returns the text with its control characters as escapes, for instance `\\u001b`."""
    return _HARMFUL.sub(_escaped, text) if _HARMFUL.search(text) else text


def _escaped(match: "re.Match[str]") -> str:
    return f"\\u{ord(match[0]):04x}"


def shell_command(*words: object) -> str:
    """Returns the command `rollstream WORDS` in one line that a user may paste into bash: words of
    another user, e.g. names and URLs, have no meaning to the shell. Every command that is printed
    for the user is written by this function.
    """
    return f"rollstream {shell_words(*words)}"


def shell_words(*words: object) -> str:
    """Returns words in one line, each quoted for bash."""
    return " ".join(map(_quoted, map(str, words)))


def _quoted(word: str) -> str:
    import shlex  # only few commands print another one

    if word == printable(word) and not {"\t", "\n"} & set(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    escaped = printable(plain).replace("\n", "\\n").replace("\t", "\\t")
    return f"$'{escaped}'"


SUBSTITUTES = str.maketrans(
    {
        "│": "|", "─": "-", "┼": "+", "━": "=", "╸": "=", "╺": "-", "╭": "+", "╮": "+", "╰": "+",
        "╯": "+", "█": "#", "░": ".", "▁": "_", "▂": ".", "▃": ",", "▄": "-", "▅": "=", "▆": "+",
        "▇": "*", "·": "-", "–": "-", "—": "-", "−": "-", "…": "~", "→": ">", "←": "<", "×": "x",
        "≥": ">=", "≤": "<=", "≠": "!=", "±": "+-", "✓": "+", "✗": "x",
        "⟨": "<", "⟩": ">", "’": "'", "“": '"', "”": '"', "\u00a0": " ",
    }
)  # fmt: skip
"""What stands for our own characters in an encoding without them; mostly one column for one, so
that tables stay in line. Others become escapes.
"""


def _substituted(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(SUBSTITUTES)
    return lacking.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error("rollstream.substitutes", _substituted)


class OutputStream:
    """Writes to the text stream `stream` of this process, None if it was closed before the start.
    A write that fails raises `OutputLost`; if the stream is `lasting`, its text is dropped instead,
    now and later, and `note` is called once with the reason, but not for a closed pipe.
    """

    def __init__(self, stream: TextIO | None, lasting: bool = False) -> None:
        self.stream = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
        self.lasting = lasting
        self.note: Callable[[str], object] = str

    def write(self, text: str) -> int:
        try:
            self._write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
        except UnicodeEncodeError as error:
            encoding = error.encoding
            self.stream.write(text.encode(encoding, "rollstream.substitutes").decode(encoding))

    def _lose(self, error: OSError) -> None:
        if isinstance(error, BlockingIOError):  # a pipe that another program made non-blocking
            os.set_blocking(self.stream.fileno(), True)
            return
        # The interpreter flushes what is left at its end, which would fail again.
        with suppress(OSError, ValueError):  # a stream without a file
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)
        reason = error.strerror or str(error)
        if not self.lasting:
            raise OutputLost(
                f"the output cannot be written: {reason}", error.errno == errno.EPIPE
            ) from error
        if error.errno != errno.EPIPE:  # `head` has read what it wants
            note, self.note = self.note, str
            note(reason)


class PrintableStream:
    """Writes to `raw_stream` and makes all text printable; it is used in the place of that stream.
    What writes escape sequences of its own on purpose writes to `raw_stream`.
    """

    def __init__(self, stream: TextIO | None, lasting: bool = False) -> None:
        self.raw_stream = OutputStream(stream, lasting)

    def write(self, text: str) -> int:
        self.raw_stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Returns the stream below a `PrintableStream`, or the stream itself."""
    return getattr(stream, "raw_stream", stream)


def protect_output() -> None:
    """Let everything that this process prints by Python from now on be printable, tracebacks and
    logs too. A lost stderr ends nothing.
    """
    sys.stdout, sys.stderr = _protected(sys.stdout), _protected(sys.stderr, lasting=True)


def outlast_output() -> None:
    """Let a command whose work is more than its output outlast it: text that stdout no longer takes
    is dropped, with a note on stderr.
    """
    stream = raw_stream(sys.stdout)
    if isinstance(stream, OutputStream):
        stream.lasting = True
        stream.note = _note_lost


def _note_lost(reason: str) -> None:
    text = f"the output cannot be written ({reason}); the command continues without it"
    print(f"rollstream: {text}", file=sys.stderr)


@contextmanager
def printable_output() -> Generator[None]:
    """Protect the output within the block (`protect_output`)."""
    before = sys.stdout, sys.stderr
    protect_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _protected(stream: TextIO | None, lasting: bool = False) -> TextIO:
    # A proxy of rich has all attributes of the stream below, so the type decides.
    is_protected = isinstance(stream, PrintableStream)
    return cast(TextIO, stream if is_protected else PrintableStream(stream, lasting))
