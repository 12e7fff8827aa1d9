"""The run that the cases look at: made once a process, and copied for each case."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from testbed.hostile_runs.base_run import make_base_run


@cache
def _made() -> tuple["TemporaryDirectory[str]", Path]:
    folder = TemporaryDirectory(prefix="rollstream-looked-at-")  # removed with the process
    return folder, make_base_run(Path(folder.name) / "run")


def copied_run(folder: Path) -> Path:
    """Copies the run to `folder`, and returns it."""
    shutil.copytree(_made()[1], folder)
    file = folder / "config.json"
    configuration = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(configuration | {"folder": str(folder)}), encoding="utf-8")
    return folder
