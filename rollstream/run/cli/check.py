"""`rollstream check CONFIG`: the checks of `rollstream run`, in seconds, without starting or
writing anything. Exit codes: 1 the log cannot be reached now, 2 the run would be refused.
"""

import argparse
import json

from rich.console import Console

from rollstream.printable import shell_command
from rollstream.run.checks.check import CheckReport
from rollstream.run.checks.findings import Verdict
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.cli.configuration import load_checked
from rollstream.run.console import TerminalConsole

MARKS: dict[Verdict, str] = {"ok": "✓", "warning": "!", "refused": "✗"}
ASCII_MARKS: dict[Verdict, str] = {"ok": "+", "warning": "!", "refused": "x"}
STYLES: dict[Verdict, str] = {"warning": "yellow", "refused": "bold red"}


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "examples/quickstart.toml",
        "examples/dataset.toml --set evaluation.prompts=20 --json",
    )
    command.add_configuration()
    command.add_accept()
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    report, _ = load_checked(arguments)
    if arguments.json:
        lines = [finding.line() for finding in report.findings]
        verdict = "refused" if report.is_refused else "ok"
        facts = {"verdict": verdict, "findings": lines, "fitted": list(report.fitted)}
        print(json.dumps({**facts, "seconds": round(report.seconds, 2)}))
        return report.exit_code
    console = TerminalConsole(highlight=False)
    for finding in report.findings:
        _print(console, finding.verdict, f"{finding.subject:<10} {finding.text}")
    for line in report.fitted:
        _print(console, "ok", f"{'default':<10} {line}")
    if report.is_refused:
        _print(console, "refused", "nothing was started; mend what is marked and check again")
        return report.exit_code
    command = shell_command("run", arguments.configuration, *_options(arguments))
    console.print(
        f"checked in {report.seconds:.1f} s, nothing was started; go on: {command}",
        soft_wrap=True,
    )
    return 0


def print_notes(report: CheckReport, console: Console) -> None:
    """Prints before `rollstream run` starts: warnings, and defaults that became others."""
    for finding in report.findings:
        if finding.verdict == "warning":
            _print(console, "warning", f"{finding.subject}: {finding.text}")
    for line in report.fitted:
        _print(console, "ok", f"default: {line}")


def _print(console: Console, verdict: Verdict, text: str) -> None:
    encoding = getattr(console.file, "encoding", None) or "utf-8"
    line = f"{MARKS[verdict]} {text}"
    try:
        line.encode(encoding)
    # A terminal without these marks.
    except UnicodeEncodeError:
        line = f"{ASCII_MARKS[verdict]} {text}".encode(encoding, "replace").decode(encoding)
    console.print(line, style=STYLES.get(verdict), highlight=False, soft_wrap=True)


def _options(arguments: argparse.Namespace) -> list[str]:
    words = [word for override in arguments.overrides for word in ("--set", override)]
    words += ["--seed", arguments.seed] if arguments.seed is not None else []
    words += ["--run", arguments.run] if arguments.run is not None else []
    return words + (["--accept-config"] if arguments.accept_config else [])
