"""Keeps the results of a benchmark whose pieces take minutes each, in a folder of the system's
temporary ones, until all are measured: so an interrupted benchmark resumes.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kept_folder(name: str, quick: bool) -> Path:
    """Returns the folder of the results of the benchmark `name`, which exists then."""
    folder = Path(tempfile.gettempdir()) / f"rollstream-{name}{'-quick' if quick else ''}"
    folder.mkdir(exist_ok=True)
    return folder


def kept(path: Path, measure: Callable[[], object]) -> Any:
    """Returns the JSON value that is kept at `path`, or a new one, which is kept then, as a whole
    or not at all.
    """
    if not path.exists():
        whole = path.with_suffix(".part")
        whole.write_text(json.dumps(measure()))
        whole.rename(path)
    return json.loads(path.read_text())
