"""The git commit of this code: from the build's `_revision.py` (`setup.py`), else from git."""

import subprocess
from importlib import import_module
from pathlib import Path

UNKNOWN = "unknown"
_PACKAGE = Path(__file__).parent
# Of each call of git; after it the revision is unknown.
_GIT_TIMEOUT_S = 5.0


def code_revision(package: Path = _PACKAGE) -> str:
    """`+changes` if tracked files differ; `unknown` for a copy of the sources that is neither built
    nor a checkout.
    """
    if (package / "_revision.py").is_file():
        return str(import_module("rollstream._revision").REVISION)
    top = _git(package, "rev-parse", "--show-toplevel")
    # Else a virtual environment inside a user's own repository would report the user's commit.
    is_ours = top == str(package.parent.resolve()) and _git(package, "ls-files", "revision.py")
    commit = _git(package, "rev-parse", "HEAD") if is_ours else ""
    if not commit:
        return UNKNOWN
    return f"{commit}+changes" if _git(package, "status", "--porcelain", "-uno") else commit


def _git(folder: Path, *arguments: str) -> str:
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
