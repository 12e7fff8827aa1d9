"""What a backup of a finished run lacks (`missing_in_backup`), and what a removal leaves of it
(`left_after_removal`).

Both compare with a plain walk through the run's folder, and not with the declarations by which the
commands decide: a writer without a declaration shows as a missing or a left file.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from testbed.own.kinds import REPOSITORY

NOT_COPIED = (
    # The docs say so: figures and messages, and what the next process makes again.
    "metrics/", "logs/", "report.html", "beside.html", "token-scores.parquet", "nonces.json",
    "run.lock", "replay.lock", "store/probes/", "store/audit/",
    "bus/",  # as segments, which `tests/backup` compares record by record
    "store/~locks/", "store/~writing/",  # the store's own
)  # fmt: skip
"""Parts of a run's folder that no backup has."""
COPIED = ("metrics/eval.jsonl", "metrics/started.json")


def files(folder: Path) -> Iterator[str]:
    """Yields the paths of all files and links below the folder, relative to it."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


def missing_in_backup(run: Path) -> list[str]:
    """Back up a finished run; returns what the backup lacks of it, or has with other content."""
    with tempfile.TemporaryDirectory() as scratch:
        backup = Path(scratch) / "backup"
        REPOSITORY.run("backup", str(run), str(backup))
        return [path for path in files(run) if _is_due(path) and not _is_copied(run, backup, path)]


def _is_due(path: str) -> bool:
    return path in COPIED or not path.startswith(NOT_COPIED)


def _is_copied(run: Path, backup: Path, path: str) -> bool:
    copy = backup / (path if path.startswith("store/") else f"folder/{path}")
    return copy.is_file() and copy.read_bytes() == (run / path).read_bytes()


def left_after_removal(run: Path) -> list[str]:
    """Remove a finished run; returns what is left of its folder."""
    REPOSITORY.run("rm", str(run), "--yes")
    left = list(files(run)) if run.exists() else []
    return left or ([str(run)] if run.exists() else [])
