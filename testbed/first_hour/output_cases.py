"""What commands print, and the words that they get: lost output, encodings, narrow terminals,
pipes, text of another user, and text that is taken for a path.
"""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollstream.look.monitor.observer import RunObserver
from rollstream.look.monitor.snapshot import RunSnapshot, run_settings_of
from rollstream.look.monitor.view import LiveView
from rollstream.printable import OutputStream, PrintableStream
from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.run.console import TerminalConsole
from testbed.first_hour.case import FirstHourCase
from testbed.first_hour.looked_at_run import copied_run
from testbed.servers.variables import environment

Fault = Callable[[Path], str]
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e"
WAIT_S = 60.0


def printed(words: Sequence[str]) -> tuple[int, str, str]:
    """Runs a command in this process; returns its exit code, and what a pipe gets."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def _lost(words: str, redirection: str, code: int, **variables: str) -> Fault:
    """Runs a command in a shell, with {run}; nothing but one line may be on stderr."""

    def fault(folder: Path) -> str:
        run = copied_run(folder / "run") if "{run}" in words else folder
        line = f"{sys.executable} -m rollstream {words.format(run=run)} {redirection}"
        ended = subprocess.run(
            ["bash", "-c", line], capture_output=True, timeout=WAIT_S, check=False, cwd=folder,
            env={**os.environ, **variables},
        )  # fmt: skip
        errors = ended.stderr.decode()
        if ended.returncode != code or "Traceback" in errors or len(errors.splitlines()) > 1:
            return f"exit {ended.returncode} and {errors[-300:]!r}"
        return ""

    return fault


HEAD = "| head -c0; exit ${PIPESTATUS[0]}"


def _encoded(encoding: str) -> Fault:
    def fault(folder: Path) -> str:
        data = io.BytesIO()
        stream = PrintableStream(io.TextIOWrapper(data, encoding=encoding, write_through=True))
        print("step 7 · 61 % │ ▁█ 日本 \ud800 …", file=stream)
        text = data.getvalue().decode(encoding)
        return "" if text.startswith("step 7") and text.endswith("\n") else repr(text)

    return fault


class _BrokenStream(io.StringIO):
    """Fails at every write, as a terminal that was closed."""

    def write(self, text: str, /) -> int:
        raise OSError(5, "Input/output error")


def _lasting_output_is_dropped(folder: Path) -> str:
    notes: list[str] = []
    stream = OutputStream(_BrokenStream(), lasting=True)
    stream.note = notes.append
    for _ in range(3):
        stream.write("step 1\n")
    return "" if notes == ["Input/output error"] else f"notes: {notes}"


class _FailingObserver(RunObserver):
    def observe(self, *arguments: object, **more: object) -> RunSnapshot:
        raise ZeroDivisionError("no width")


def _view_fails(folder: Path) -> str:
    """Shows a run by a view that fails, in whatever way."""
    configuration = load(copied_run(folder / "run") / "config.json")
    settings = run_settings_of(configuration)
    observer = _FailingObserver(settings, folder, lambda: None, lambda: 0.0)
    try:
        with LiveView(observer, TerminalConsole(), as_json=False) as view:
            view.show([])
    except ZeroDivisionError:
        return "the view's failure ends the run"
    return ""


def _narrow_frames(folder: Path) -> str:
    run = copied_run(folder / "run")
    for columns in ("0", "1", "5", "39"):
        with environment({"COLUMNS": columns, "LINES": "1"}):
            code, _, errors = printed(["top", str(run), "--once"])
        if code:
            return f"{columns} columns: exit {code}, {errors}"
    return ""


ODD_WORDS = {
    "256_bytes": "x" * 256,
    "5000_bytes": "x" * 5000,
    "5000_folders": "a/" * 2500,
    "long_json": "x" * 256 + ".json",
    "nul": "a\0b",
    "surrogate": "a\udcff",
    "half_character": "\ud800",
    "home": "~nosuchuser",
    "line_break": "a\nb",
    "digits": "9" * 5000,
    "superscript": "²",
    "empty": "",
}
WORD_LINES: Mapping[str, tuple[str, ...]] = {
    "query_run": ("query", "X", "SELECT 1"),
    "query_sql": ("query", "R", "X"),
    "query_swapped": ("query", "X", "R"),
    "tail_topic": ("tail", "R", "X"),
    "tail_where": ("tail", "R", "ledger", "--where", "schema=X"),
    "tail_from": ("tail", "R", "ledger", "--from", "X"),
    "inspect_id": ("inspect", "R", "X"),
    "config_word": ("config", "R", "X"),
    "config_set": ("config", "R", "--set", "trainer.lr=X"),
    "weights_version": ("weights", "show", "R", "X"),
    "checkpoint": ("checkpoints", "show", "R", "X"),
    "audit_run": ("audit", "X"),
    "trust_folder": ("trust", "R", "--folder", "X"),
}


OUTPUT_LINES: Mapping[str, tuple[str, ...]] = {
    "report_output": ("report", "R", "--output", "X/X"),
    "trace_output": ("trace", "R", "--perfetto", "X/X"),
    "backup_output": ("backup", "R", "X/X"),
}
LONG_WORDS = ("256_bytes", "5000_folders")


def _odd_word(line: tuple[str, ...], names: Sequence[str] = tuple(ODD_WORDS)) -> Fault:
    def fault(folder: Path) -> str:
        run = copied_run(folder / "run")
        for name in names:
            odd = ODD_WORDS[name]
            words = [str(run) if word == "R" else word.replace("X", odd) for word in line]
            with contextlib.chdir(folder):
                try:
                    code, _, errors = printed(words)
                except Exception as error:  # noqa: BLE001  a user would see a traceback
                    return f"{name}: {type(error).__name__}: {str(error)[:200]}"
            if (code and not errors.strip()) or "Traceback" in errors:
                return f"{name}: exit {code}, {errors[-200:]!r}"
        return ""

    return fault


def _long_query(folder: Path) -> str:
    run = copied_run(folder / "run")
    text = f"SELECT 7 AS n -- {'x' * 300}"
    code, output, errors = printed(["query", text, str(run)])
    return "" if (code, output) == (0, "n\n7\n") else f"exit {code}, {output!r}, {errors!r}"


def _piped(words: str, *expected: str) -> Fault:
    """Compares lines that a pipe gets; each is whole, with cells separated by tabs."""

    def fault(folder: Path) -> str:
        run = copied_run(folder / "run")
        with environment({"COLUMNS": "40"}):
            code, output, errors = printed([w.format(run=run) for w in words.split("|")])
        lines = output.splitlines()
        missing = [line for line in expected if line not in lines]
        return "" if not code and not missing else f"exit {code}, {errors!r}: no {missing}"

    return fault


def _hostile_name(words: str) -> Fault:
    """Prints a run whose folder's name has escape sequences."""

    def fault(folder: Path) -> str:
        run = copied_run(folder / ESCAPES)
        code, output, errors = printed([w.format(run=run) for w in words.split("|")])
        harmful = set(ESCAPES) & set("\x1b\x07\x9b\r\u202e") & set(output + errors)
        return f"exit {code}: {harmful} is printed" if harmful else ""

    return fault


CASES = (
    *(
        FirstHourCase(f"closed_pipe_{name}", "lost_output", _lost(words, HEAD, code), is_slow=True)
        for name, words, code in (
            ("tail", "tail {run} ledger --from begin", 141),
            ("query", "query {run} 'SELECT * FROM trajectories'", 141),
            ("top", "top {run} --json", 141),
            ("trust", "trust {run}", 0),
        )
    ),
    FirstHourCase("full_disk", "lost_output", _lost("ls {run}/..", "> /dev/full", 1), is_slow=True),
    FirstHourCase("closed_stdout", "lost_output", _lost("config", ">&-", 0), is_slow=True),
    FirstHourCase("all_closed", "lost_output", _lost("config", ">&- 2>&- <&-", 0), is_slow=True),
    FirstHourCase("full_stderr", "lost_output", _lost("ls {run}", "2>/dev/full", 0), is_slow=True),
    FirstHourCase(
        "ascii_frame",
        "lost_output",
        _lost("top {run} --once", "", 0, PYTHONIOENCODING="ascii"),
        is_slow=True,
    ),
    *(
        FirstHourCase(f"encoding_{name}", "lost_output", _encoded(name))
        for name in ("ascii", "latin-1", "cp1252", "utf-8")
    ),
    FirstHourCase("view_fails", "lost_output", _view_fails),
    FirstHourCase("gone_terminal", "lost_output", _lasting_output_is_dropped),
    FirstHourCase("narrow_frames", "lost_output", _narrow_frames, is_slow=True),
    *(
        FirstHourCase(f"odd_word_{name}", "text_probed_as_path", _odd_word(line), is_slow=True)
        for name, line in WORD_LINES.items()
    ),
    *(
        FirstHourCase(
            f"odd_word_{name}", "text_probed_as_path", _odd_word(line, LONG_WORDS), is_slow=True
        )
        for name, line in OUTPUT_LINES.items()
    ),
    FirstHourCase("long_query", "text_probed_as_path", _long_query),
    FirstHourCase("piped_config", "piped_tables", _piped("config|{run}", "setting\tvalue\tset in")),
    FirstHourCase(
        "piped_query",
        "piped_tables",
        _piped(
            f"query|{{run}}|SELECT '{'a' * 200}' AS a, 'b\tc' AS b", "a\tb", f"{'a' * 200}\tb\\tc"
        ),
    ),
    FirstHourCase(
        "piped_rows", "piped_tables", _piped("query|{run}|SELECT range AS n FROM range(99)", "98")
    ),
    FirstHourCase(
        "piped_report", "piped_tables", _piped("report|{run}|--output|{run}/r.html", "restarts\t0")
    ),
    FirstHourCase(
        "piped_diff", "piped_tables", _piped("diff|{run}|{run}", "admitted\t17\t17"), is_slow=True
    ),
    *(
        FirstHourCase(f"hostile_name_{words.partition('|')[0]}", "escapes", _hostile_name(words))
        for words in ("ls|{run}/..", "config|{run}", "audit|{run}", "query|{run}|SELECT x")
    ),
)
