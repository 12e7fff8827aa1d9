"""`folders_read`: the share of model folders from which every reader takes the same tensors, tokens
and prompts as transformers, or which it refuses by name; the note names the others.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from testbed.model_folders.reading import tokenizer_fault, weight_fault
from testbed.model_folders.tokenizer_folders import TOKENIZER_FOLDERS
from testbed.model_folders.weight_folders import WEIGHT_FOLDERS

QUICK_STEP = 6
"""The quick form tries every sixth folder."""


def cases(quick: bool) -> Iterator[Case]:
    """Yields the share."""
    trials = {**_weight_trials(), **_tokenizer_trials()}
    names = list(trials)[:: QUICK_STEP if quick else 1]
    wrong = [f"{name}: {fault}" for name in names if (fault := _tried(trials[name]))]
    share = 1 - len(wrong) / len(names)
    note = "; ".join([f"{len(names)} folders", *wrong])
    yield alone("folders_read", share, "share", at_least=1.0, note=note)


def _weight_trials() -> dict[str, Callable[[Path, Path], str]]:
    def trial(number: int, path: Path, scratch: Path) -> str:
        WEIGHT_FOLDERS[number].write(path)
        return weight_fault(path, WEIGHT_FOLDERS[number].refused, scratch)

    return {
        folder.name: lambda path, scratch, n=number: trial(n, path, scratch)
        for number, folder in enumerate(WEIGHT_FOLDERS)
    }


def _tokenizer_trials() -> dict[str, Callable[[Path, Path], str]]:
    def trial(number: int, path: Path, scratch: Path) -> str:
        folder = TOKENIZER_FOLDERS[number]
        folder.write(path)
        return tokenizer_fault(path, folder.refused, folder.has_tools, scratch)

    return {
        f"tokenizer, {folder.name}": lambda path, scratch, n=number: trial(n, path, scratch)
        for number, folder in enumerate(TOKENIZER_FOLDERS)
    }


def _tried(trial: Callable[[Path, Path], str]) -> str:
    """Returns the fault of one folder; an error that no reader should raise is one."""
    with tempfile.TemporaryDirectory(prefix="rollstream-folders-") as name:
        try:
            return trial(Path(name) / "model", Path(name) / "scratch")
        except Exception as error:  # noqa: BLE001 - any error of one folder is its result
            return f"{type(error).__name__}: {error}"
