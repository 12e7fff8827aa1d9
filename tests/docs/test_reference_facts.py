"""Hand-written pages of `docs/reference/` agree with the code: invariants, exit codes, the Python
API.
"""

import re
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from rollstream import api
from rollstream.errors import EXIT_CLOSED_PIPE, EXIT_REFUSED, EXIT_UNSERVED
from rollstream.run.cli.main import EXIT_INTERRUPTED
from rollstream.run.cli.role import EXIT_STOPPED
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue
from testbed.reference_pages import FOLDER
from testbed.repository import EXAMPLES, ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CITED = re.compile(r"\binvariants? (\d+)(?:(?:,| and| to) (\d+))*")


def test_the_invariants_are_numbered_and_code_cites_no_other() -> None:
    text = (FOLDER / "invariants.md").read_text(encoding="utf-8")
    numbers = [int(one) for one in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)]
    assert numbers == list(range(1, 16))
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cited: set[int] = set()
    for name in listed.stdout.split():
        path = ROOT / name
        if path.is_file():
            for found in CITED.finditer(path.read_text(encoding="utf-8")):
                cited |= {int(one) for one in re.findall(r"\d+", found[0])}
    assert cited <= set(numbers)


def test_each_exit_code_has_its_row() -> None:
    text = (FOLDER / "exit-codes.md").read_text(encoding="utf-8")
    listed = {int(one) for one in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    ours = {EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_CLOSED_PIPE, EXIT_REFUSED, EXIT_UNSERVED}
    assert {0, 1, *ours} <= listed


def _api_page() -> str:
    return (FOLDER / "python-api.md").read_text(encoding="utf-8")


def test_each_name_of_the_api_has_its_row() -> None:
    (table,) = re.findall(r"^\| name .*?\n\n", _api_page(), re.MULTILINE | re.DOTALL)
    rows = [line.split("|")[1] for line in table.strip().splitlines()[2:]]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(api.__all__)


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that it reads is the recorded archive, the log that it writes to a new one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "late-reward").mkdir(parents=True)
    with closing(open_bus("sqlite:runs/late-reward/bus")) as bus:
        bus.create(catalogue())
    for block in BLOCK.findall(_api_page()):
        exec(block.replace("runs/quickstart-0", str(EXAMPLES / "archive")), {})
    with closing(open_bus("sqlite:runs/late-reward/bus")) as bus:
        assert sum(bus.end("annotations").values()) == 1
