"""Finds the files of a data set. A folder with several splits is refused, because its test rows
would be trained on.
"""

import re
from collections.abc import Sequence
from glob import glob, has_magic
from itertools import islice
from pathlib import Path

from rollstream.errors import ConfigurationError
from rollstream.producers.rows.row_files import KINDS, kind_of

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Files that a folder of shards may have, also with `.gz` or `.zst` behind."""
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that Hugging Face datasets writes beside the shards."""


def data_files(option: str) -> list[Path]:
    """Returns the files in the order of names: a file, the data files in a folder, or those of a
    pattern. Raises `ConfigurationError` if there is none, and for a folder with files of several
    splits.
    """
    path = Path(option).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if _is_data(file)]
        if not files:
            raise ConfigurationError(
                f"data set {option}: the folder has no file of {KINDS}{_below(path)}"
            )
        # Training would read the test split, too.
        _refuse_splits(option, files)
        return files
    if has_magic(str(path)):
        files = [Path(name) for name in sorted(glob(str(path), recursive=True))]
        files = [file for file in files if file.is_file()]
        if files:
            return files
    raise ConfigurationError(
        f"data set {option}: no such file; paths are relative to the working directory "
        f"({Path.cwd()})"
    )


_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\b")
"""How the Hub names the files of a split: `train-00000-of-00001.parquet`."""
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The splits that Hugging Face's `datasets` recognises, by words in the names of files."""


def _split_of(path: Path) -> str:
    if shard := _SHARD.match(path.name):
        return shard[1]
    words = re.split(r"[-._ 0-9]+", path.name)
    return next((split for split, names in _SPLITS.items() if not set(words).isdisjoint(names)), "")


def _refuse_splits(option: str, files: Sequence[Path]) -> None:
    splits: dict[str, list[Path]] = {}
    for file in files:
        if split := _split_of(file):
            splits.setdefault(split, []).append(file)
    if len(splits) < 2:
        return
    splits_text = ", ".join(f"{split} ({_pattern(members)})" for split, members in splits.items())
    raise ConfigurationError(
        f"data set {option}: the folder has the splits {splits_text}; name the one to train on "
        f"as `path` and one to evaluate as `held_out`, or all files as {files[0].parent / '*'}"
    )


def _pattern(files: Sequence[Path]) -> str:
    shard = _SHARD.match(files[0].name)
    if len(files) > 1 and shard is not None:
        return str(files[0].parent / f"{shard[1]}-*")
    return str(files[0]) + (" …" if len(files) > 1 else "")


_BELOW_MAX = 2_000  # of a tree that may be a whole disk


def _below(folder: Path) -> str:
    # Subfolders are often splits, so they are not read by themselves.
    looked_at = sorted(islice(folder.rglob("*"), _BELOW_MAX))
    first = next((file for file in looked_at if _is_data(file)), None)
    if first is None:
        return ""
    pattern = first.parent / f"*{first.suffix}"
    return f"; subfolders are not read, so name their files: {pattern}"


def _is_data(path: Path) -> bool:
    is_named = path.name not in _ABOUT_DATA and not path.name.startswith((".", "_"))
    return path.is_file() and kind_of(path) in SUFFIXES and is_named
