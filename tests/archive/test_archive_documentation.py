"""The examples of `docs/reference/archive.md` run."""

import re
import subprocess
import sys
from pathlib import Path

from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.storage.stores.connect import open_store
from rollstream.streams.topics import catalogue
from testbed.memory import MemoryBus
from testbed.repository import ROOT
from tests.archive.archive_samples import append, trajectory

PAGE = (ROOT / "docs" / "reference" / "archive.md").read_text(encoding="utf-8")


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
