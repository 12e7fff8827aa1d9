"""Text of somebody else reaches the terminal with visible escapes, whatever prints it."""

import io
import json
import logging
import re
import sys

import pytest
from rich.live import Live
from rich.table import Table

from rollstream.printable import PrintableStream, printable, printable_output
from rollstream.run.console import TerminalConsole
from rollstream.run.signals import warn
from testbed.repository import ROOT

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r\b\x00\u202e\u2066[red]x[/nothing] :smile:"
HARMFUL = set(HOSTILE) - set("]0;owned[2J31mx/nothing :smile:red")


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Returns what stands for both streams; rich believes that it is a terminal with colours."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def foreign_part(text: str) -> str:
    """Without the colours and cursor movements that rich writes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_print_warnings_and_logs_are_printable(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with printable_output():
        print(HOSTILE, "a\tb\n")
        warn(HOSTILE)
        handler = logging.StreamHandler()
        handler.emit(logging.makeLogRecord({"msg": HOSTILE}))
        sys.stdout.writelines([HOSTILE])
    assert not HARMFUL & set(terminal.getvalue())
    assert terminal.getvalue().count("\\u001b]0;owned\\u0007") == 4
    assert "a\tb\n" in terminal.getvalue()


def test_tables_frames_and_titles_are_printable(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with printable_output():
        console = TerminalConsole()
        table = Table("column", title=HOSTILE)
        table.add_row(HOSTILE, style="red")
        console.print(HOSTILE, table)
        with Live(table, console=console, auto_refresh=False) as live:
            live.update(table, refresh=True)
    text = terminal.getvalue()
    assert "\x1b[31m" in text  # our own colours stay
    assert not HARMFUL & set(foreign_part(text)) - {"\r"}
    assert "]0;owned\x07" not in text
    assert "[red]x[/nothing] :smile:" in text  # no markup of somebody else


def test_json_stays_json():
    stream = io.StringIO()
    print(json.dumps({"a": HOSTILE}, ensure_ascii=False), file=PrintableStream(stream))
    assert json.loads(stream.getvalue()) == {"a": HOSTILE}


def test_halves_of_characters_and_foreign_alphabets_end_no_command():
    data = io.BytesIO()
    stream = PrintableStream(io.TextIOWrapper(data, encoding="ascii", write_through=True))
    print("\ud83d é", file=stream)
    assert data.getvalue() == b"\\ud83d \\xe9\n"


def test_ordinary_text_is_left_as_it_is():
    text = "äöü 日本語 👩‍🚀 a\tb\nc \\u001b"
    assert printable(text) == text


def test_every_console_of_a_command_is_a_terminal_console():
    plain = re.compile(r"(?<!Terminal)\bConsole\(")
    sources = (ROOT / "rollstream").rglob("*.py")
    own = ROOT / "rollstream" / "run" / "console.py"
    assert [str(p) for p in sources if p != own and plain.search(p.read_text())] == []
