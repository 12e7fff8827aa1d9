"""Makes all output of a command safe for a terminal: escape sequences in another user's record,
answer or file name could rewrite lines, hide text, or type. Control characters but line breaks and
tabs become escapes of JSON's form, also in a file.
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
    """`rollstream WORDS` in one line that a user may paste into bash: words of another user have no
    meaning to the shell. Every printed command is written by this function.
    """
    return f"rollstream {shell_words(*words)}"


def shell_words(*words: object) -> str:
    """Returns the shell words in one line, each quoted for bash."""
    return " ".join(map(_quoted, map(str, words)))


def _quoted(word: str) -> str:
    # Only few commands print another one.
    import shlex

    if word == printable(word) and not {"\t", "\n"} & set(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    escaped = printable(plain).replace("\n", "\\n").replace("\t", "\\t")
    return f"$'{escaped}'"


# Replacements of our own characters in an encoding without them, mostly one column for one, so that
# tables stay in line. Others become escapes.
SUBSTITUTES = str.maketrans(
    {
        "│": "|", "─": "-", "┼": "+", "━": "=", "╸": "=", "╺": "-", "╭": "+", "╮": "+", "╰": "+",
        "╯": "+", "█": "#", "░": ".", "▁": "_", "▂": ".", "▃": ",", "▄": "-", "▅": "=", "▆": "+",
        "▇": "*", "·": "-", "–": "-", "—": "-", "−": "-", "…": "~", "→": ">", "←": "<", "×": "x",
        "≥": ">=", "≤": "<=", "≠": "!=", "±": "+-", "✓": "+", "✗": "x",
        "⟨": "<", "⟩": ">", "’": "'", "“": '"', "”": '"', "\u00a0": " ",
    }
)  # fmt: skip


def _substituted(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(SUBSTITUTES)
    return lacking.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error("rollstream.substitutes", _substituted)


class OutputStream:
    """`stream` is None if it was closed before the start. A write that fails raises `OutputLost`; a
    `lasting` stream drops its text from then on, and calls `note` once, but not for a closed pipe.
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
        # A pipe that another program made non-blocking.
        if isinstance(error, BlockingIOError):
            os.set_blocking(self.stream.fileno(), True)
            return
        # The interpreter flushes what is left at its end, which would fail again.
        # A stream may have no file.
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)
        reason = error.strerror or str(error)
        if not self.lasting:
            raise OutputLost(
                f"the output cannot be written: {reason}", error.errno == errno.EPIPE
            ) from error
        # `head` has read enough.
        if error.errno != errno.EPIPE:
            note, self.note = self.note, str
            note(reason)


class PrintableStream:
    """Intended escape sequences are written to `raw_stream`."""

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
    """All output that this process prints by Python, tracebacks and logs too. A lost stderr ends
    nothing.
    """
    sys.stdout, sys.stderr = _protected(sys.stdout), _protected(sys.stderr, lasting=True)


def outlast_output() -> None:
    """Is called for a command whose work is more than its output: lost text is dropped, with a note
    on stderr.
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
