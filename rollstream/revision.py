"""The code revision, for the ledger and `config.json`: the one that the build wrote into the
package, or git's in a checkout of this project.

Git is asked only in a checkout of this project: otherwise a virtual environment inside a user's
repository would report the user's commit.
"""

import subprocess
from importlib import import_module
from pathlib import Path

UNKNOWN = "unknown"
_PACKAGE = Path(__file__).parent
_GIT_TIMEOUT_S = 5.0


def code_revision(package: Path = _PACKAGE) -> str:
    """The commit, with `+changes` if tracked files differ from it; `unknown` for a copy of the
    sources that is neither built nor a checkout. `package` is the folder of this package.
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
