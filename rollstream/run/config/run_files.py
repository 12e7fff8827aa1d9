"""The files of a run's folder that Rollstream writes, for removal, backup and restore; any other is
the user's and stays. `tests/own/test_own_objects.py` fails on a file that is not declared.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from rollstream.storage.stores.run_keys import is_model_file

# States which run a removal deletes, from its begin to its end (`runs/run_place.py`).
REMOVAL_FILE = "removing.json"
CONFIGURATION_FILE = "config.json"
LOCKS = ("replay.lock", "run.lock")


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Declares files by a pattern of the path in the folder. A backup has the `copied` ones, which
    a resumed run reads; `kept` ones stay while a part of the store stays, whose readers need them.
    The group `file` is as in `RunKeys`.
    """

    pattern: re.Pattern[str]
    copied: bool = False
    kept: bool = False

    def owns(self, path: str, names: Collection[str] = ()) -> bool:
        """`names` are files that manifests name."""
        match = self.pattern.fullmatch(path)
        if match is None:
            return False
        file = match["file"] if "file" in self.pattern.groupindex else None
        return file is None or is_model_file(file) or file in names


def _files(pattern: str, *, copied: bool = False, kept: bool = False) -> RunFiles:
    return RunFiles(re.compile(pattern), copied, kept)


RUN_FILES = (
    _files(r"config\.json", copied=True, kept=True),
    _files(r"config\.[0-9a-f]{16}\.partial"),
    # The starting model: that of a warm-up, and the store's files for this host.
    _files(r"model/(?:tokenizer/)?(?P<file>[^/]+)", copied=True, kept=True),
    _files(r"model/task/\d+(?:\.[^/]+)?", copied=True, kept=True),
    _files(r"model/(?:tokenizer/|task/)?\.[^/]+\.[0-9a-f]{16}|\.model\.partial/.+"),
    # `started.json` has the time of version 0, which the store may not have any more.
    _files(r"metrics/(?:eval\.jsonl|started\.json)", copied=True),
    _files(r"metrics/[^/]+\.(?:jsonl|partial)"),
    _files(r"metrics/endpoints/[^/]+\.(?:json|partial)"),
    _files(r"metrics/forward-[a-z]+\.(?:json|lock)|metrics/(?:tensorboard|wandb)/.+"),
    _files(r"logs/[^/]+\.log(?:\.1)?"),
    _files(r"profiles/[^/]+\.json", copied=True),
    _files(r"profiles/[^/]+\.partial"),
    _files(r"(?:report|beside)\.html|\.(?:report|beside)\.html\.partial"),
    # The mark of a replay: without it roles would continue the restored folder as a run.
    _files(r"replay\.json", copied=True),
    _files(r"replay\.json\.partial|nonces\.(?:json|partial)"),
    _files(r"token-scores\.parquet", kept=True),
    _files(r"\.token-scores\.parquet\.\d+\.partial"),
    _files(r"removing\.json|removing\.partial|(?:replay|run)\.lock"),
)
COPIED = ("config.json", "replay.json", "metrics/eval.jsonl", "metrics/started.json")
# A backup looks for its files in these places alone.
COPIED_FOLDERS = ("model", "profiles")
# A link in the place of one of these folders is the run's, too.
FOLDERS = ("metrics", "metrics/endpoints", "logs", "profiles", "model", "model/tokenizer",
           "model/task", ".model.partial")  # fmt: skip


def declared_files(path: str, names: Collection[str] = ()) -> RunFiles | None:
    """Returns the declared files by a path with `/` between parts; None if the file is not the
    run's.
    """
    return next((files for files in RUN_FILES if files.owns(path, names)), None)
