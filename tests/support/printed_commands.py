"""The commands that README and docs print: the lines of their fenced blocks, as whole commands,
without trailing remarks.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from testbed.repository import ROOT

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BACKSLASH = chr(92)
SHELL = ("", "sh", "bash", "console")
ASSIGNMENT = re.compile(r"[A-Z_0-9]+=\S*")
PROGRAMS = (
    "rollstream", "python", "make", "git", "pip", "docker", "torchrun", "kill", "pkill",
    "tensorboard", "export", "pre-commit", "hf",
)  # fmt: skip
"""A line of a block that starts with one of these is a command."""


@dataclass(frozen=True, slots=True)
class PrintedCommand:
    page: str
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def printed_commands() -> tuple[PrintedCommand, ...]:
    return tuple(one for page in pages() for one in _commands_of(page))


def _commands_of(page: Path) -> Iterator[PrintedCommand]:
    name = str(page.relative_to(ROOT))
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language not in SHELL:
            continue
        lines = iter(block.splitlines())
        for line in lines:
            text = line.strip().removeprefix("$ ")
            while (words := _split(text)) is None:
                text = f"{text.removesuffix(BACKSLASH).rstrip()} {next(lines).strip()}"
            yield from _command(name, words)


def _split(text: str) -> list[str] | None:
    """The words of a line without the remark behind it; None while a quote is open or the line ends
    in a backslash.
    """
    if text.endswith(BACKSLASH):
        return None
    for end in [m.start() for m in re.finditer(r"\s{2,}| # ", text)]:
        try:
            return shlex.split(text[:end])
        except ValueError:
            continue  # inside quotes
    try:
        return shlex.split(text)
    except ValueError:
        return None if _is_command(text.split()) else []


def _command(page: str, words: list[str]) -> Iterator[PrintedCommand]:
    variables: list[tuple[str, str]] = []
    while words and ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables.append((name, value))
    if _is_command(words):
        words[0] = words[0].rpartition("/")[2]
        yield PrintedCommand(page, tuple(words), tuple(variables))


def _is_command(words: list[str]) -> bool:
    if not words:
        return False
    program = words[0].rpartition("/")[2]
    return program in PROGRAMS and not words[0].endswith("/") and len(words) > 1


def without_optional_parts(words: tuple[str, ...]) -> list[str]:
    """`list [RUN] [--json | --csv]` → `list`."""
    kept: list[str] = []
    is_optional = False
    for word in words:
        is_optional = is_optional or word.startswith("[")
        if not is_optional:
            kept.append(word)
        is_optional = is_optional and not word.endswith("]")
    return kept
