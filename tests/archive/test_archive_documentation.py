"""`docs/reference/archive.md` lists the columns of the files, and its examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.storage.archive.rows import ARCHIVED_CLASSES
from rollstream.storage.archive.schema import ENVELOPE_COLUMNS, topic_columns
from rollstream.storage.stores.connect import open_store
from rollstream.streams.topics import catalogue
from testbed.memory import MemoryBus
from testbed.repository import ROOT
from tests.archive.archive_samples import append, trajectory

PAGE = (ROOT / "docs" / "reference" / "archive.md").read_text(encoding="utf-8")


def written(type_: pa.DataType) -> str:
    """A type as the page writes it."""
    if pa.types.is_list(type_):
        return f"list<{written(type_.value_type)}>"
    if pa.types.is_struct(type_):
        return f"struct<{', '.join(f'{field.name}: {written(field.type)}' for field in type_)}>"
    if pa.types.is_map(type_):
        return f"map<{written(type_.key_type)}, {written(type_.item_type)}>"
    return str(type_)


def documented(name: str) -> list[tuple[str, str]]:
    """Names and types of the table after a mark."""
    table = PAGE.split(f"<!-- {name} -->\n")[1].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)


def test_the_columns_of_every_topic_are_documented() -> None:
    assert documented("envelope") == [
        (field.name, written(field.type)) for field in ENVELOPE_COLUMNS
    ]


@pytest.mark.parametrize("topic", ARCHIVED_CLASSES)
def test_the_columns_of_a_topic_are_documented(topic: str) -> None:
    wanted = [(column.name, written(column.arrow)) for column in topic_columns(topic)]
    assert documented(topic) == wanted


def test_the_examples_run_in_the_folder_of_a_run(tmp_path: Path) -> None:
    bus, store = MemoryBus(), open_store(f"file:{tmp_path}/store")
    bus.create(catalogue())
    append(bus, "trajectories", [trajectory(group) for group in range(5)])
    archive = TopicArchive(bus, store, "tiny", "trajectories", ArchiveSettings())
    archive.start()
    archive.finish()
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "0.2" in done.stdout  # rewards 0 to 0.4
