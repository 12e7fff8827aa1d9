"""Which code runs: the git commit of this source tree, for the ledger and `config.json`."""

import subprocess
from pathlib import Path

UNKNOWN = "unknown"
_WAIT_S = 5.0


def code_revision() -> str:
    """The commit, `+changes` if tracked files differ from it, `unknown` outside a repository."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return UNKNOWN
    return f"{commit}+changes" if _git("status", "--porcelain", "-uno") else commit


def _git(*arguments: str) -> str:
    source = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(source), *arguments],
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
