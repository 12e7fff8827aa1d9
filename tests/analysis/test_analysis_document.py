"""docs/how-to/query-the-log.md: every block runs as written and prints the output shown."""

import re

import pytest

from tests.analysis.document import DOCUMENT, ROOT, blocks, run

BLOCKS = list(blocks(DOCUMENT.read_text()))
COMMANDS = [block for block in BLOCKS if block.kind == "console"]


@pytest.mark.parametrize(
    "block", COMMANDS, ids=lambda block: block.code.split()[1] + block.code[-40:-25]
)
def test_a_command_prints_what_the_document_shows(block):
    assert run(block, {}) == block.printed


def test_the_notebook_prints_what_the_document_shows():
    namespace: dict[str, object] = {}
    for block in BLOCKS:
        if block.kind == "python":
            assert run(block, namespace) == block.printed


def test_ten_questions_are_answered():
    questions = re.findall(r"^### (\d+)\. .*\?$", DOCUMENT.read_text(), re.MULTILINE)
    assert questions == [str(number) for number in range(1, 11)]
    assert len(BLOCKS) >= 10


def test_the_shipped_archive_is_small_and_names_no_machine():
    files = [path for path in (ROOT / "examples" / "archive").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 450_000
    assert '"folder": null' in (ROOT / "examples" / "archive" / "config.json").read_text()
