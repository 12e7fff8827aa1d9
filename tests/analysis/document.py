"""The blocks of docs/how-to/query-the-log.md: run as written, their output compared or rewritten.

A ```console block is one `$ command` (to the line that ends its quotes) and its output; a ```python
block runs in the namespace of those before it, and a ```text block behind it is its output. `python
-m tests.analysis.document` writes the present output into the document.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from testbed.repository import ROOT

DOCUMENT = ROOT / "docs" / "how-to" / "query-the-log.md"
_BLOCK = re.compile(
    r"```(?P<kind>console|python)\n(?P<code>.*?)```\n(?:```text\n(?P<printed>.*?)```\n)?", re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """`printed` is the output in the document."""

    kind: str
    code: str
    printed: str
    start: int
    end: int

    def text(self, printed: str) -> str:
        """The block's text in the document."""
        if self.kind == "console":
            return f"```console\n{self.code}{printed}```\n"
        shown = f"```text\n{printed}```\n" if printed else ""
        return f"```python\n{self.code}```\n{shown}"


def blocks(document: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(document):
        kind, code, printed = match["kind"], match["code"], match["printed"] or ""
        if kind == "console":
            code, printed = _command_and_output(code)
        yield Block(kind, code, printed, match.start(), match.end())


def run(block: Block, namespace: dict[str, object]) -> str:
    """The block's output now."""
    if block.kind == "console":
        return _run_command(block.code.removeprefix("$ "))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(ROOT):
        exec(compile(block.code, str(DOCUMENT), "exec"), namespace)
    return printed.getvalue()


def _command_and_output(code: str) -> tuple[str, str]:
    """Lines belong to the command until its double quotes are closed and no backslash continues
    it.
    """
    lines = code.splitlines(keepends=True)
    assert lines[0].startswith("$ "), lines[0]
    for count in range(1, len(lines) + 1):
        command = "".join(lines[:count])
        if command.replace('\\"', "").count('"') % 2 == 0 and not command.endswith("\\\n"):
            return command, "".join(lines[count:])
    raise AssertionError(f"quotes are not closed: {code}")


def _run_command(command: str) -> str:
    """Standard output of a shell command, at 100 columns."""
    shell = f'rollstream() {{ "{sys.executable}" -m rollstream "$@"; }}\n{command}'
    environment = os.environ | {"COLUMNS": "100", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["bash", "-c", shell], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def main() -> None:
    document, namespace = DOCUMENT.read_text(), {}
    written, at = [], 0
    for block in blocks(document):
        written += [document[at : block.start], block.text(run(block, namespace))]
        at = block.end
    DOCUMENT.write_text("".join([*written, document[at:]]))


if __name__ == "__main__":
    main()
