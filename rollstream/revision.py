"""Finds the revision of this code, the git commit, which the ledger, `config.json` and `rollstream
--version` state. In a built package the build wrote it into `_revision.py` (`setup.py`); in a
checkout of this project git states it.

Git's answer counts only for a checkout of this project: a package in a virtual environment inside a
user's own repository would otherwise report the user's commit.
"""

import subprocess
from importlib import import_module
from pathlib import Path

UNKNOWN = "unknown"
_PACKAGE = Path(__file__).parent
_GIT_TIMEOUT_S = 5.0  # of each call of git; after it the revision is unknown


def code_revision(package: Path = _PACKAGE) -> str:
    """Returns the commit, with `+changes` if tracked files differ from it; `unknown` for a copy of
    the sources that is neither built nor a checkout. `package` is the folder of this package.
    """
    if (package / "_revision.py").is_file():
        return str(import_module("rollstream._revision").REVISION)
    top = _git(package, "rev-parse", "--show-toplevel")
    is_ours = top == str(package.parent.resolve()) and _git(package, "ls-files", "revision.py")
    commit = _git(package, "rev-parse", "HEAD") if is_ours else ""
    if not commit:
        return UNKNOWN
    return f"{commit}+changes" if _git(package, "status", "--porcelain", "-uno") else commit


def _git(folder: Path, *arguments: str) -> str:
    """Returns the output of a git command; "" if it fails or git is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
