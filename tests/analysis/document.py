"""The blocks of docs/how-to/query-the-log.md: run as written, their output compared or rewritten.

A ```console block is one `$ command` (to the line that ends its quotes) and its output; a ```python
block runs in the namespace of those before it, and a ```text block behind it is its output. `python
-m tests.analysis.document` writes the present output into the document.
"""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
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
    """What a terminal of 100 columns shows of a shell command, without colours."""
    shell = f'rollstream() {{ "{sys.executable}" -m rollstream "$@"; }}\n{command}'
    environment = os.environ | {"COLUMNS": "100", "LC_ALL": "C.UTF-8"}
    ours, theirs = pty.openpty()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            ["bash", "-c", shell], cwd=ROOT, env=environment, stdout=theirs, stderr=errors
        )
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # the last process has closed its side
            while more := os.read(ours, 65536):
                printed += more
        os.close(ours)
        code = process.wait()
        errors.seek(0)
        assert code == 0, f"{command}\n{errors.read().decode()}"
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.decode())
    return "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"


def main() -> None:
    document, namespace = DOCUMENT.read_text(), {}
    written, at = [], 0
    for block in blocks(document):
        written += [document[at : block.start], block.text(run(block, namespace))]
        at = block.end
    DOCUMENT.write_text("".join([*written, document[at:]]))


if __name__ == "__main__":
    main()
