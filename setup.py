"""Writes the revision of the code into wheel and sdist (`rollstream/_revision.py`); the rest of the
build is in pyproject.toml. It is that of ROLLSTREAM_REVISION, of an sdist's own file, or of git.
"""

import os
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent.resolve()
NAME = Path("rollstream") / "_revision.py"


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def revision() -> str:
    given = os.environ.get("ROLLSTREAM_REVISION")
    if given:
        return given
    if git("rev-parse", "--show-toplevel") != str(HERE):  # an sdist inside another repository
        return ""
    changed = "+changes" if git("status", "--porcelain", "-uno") else ""
    commit = git("rev-parse", "HEAD")
    return commit + changed if commit else ""


def write(folder: str) -> None:
    """An sdist has the file already: what is not known better stays."""
    found = revision()
    if found:
        (Path(folder) / NAME).write_text(f'REVISION = "{found}"\n')


class Built(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there the sources are the checkout's, which git is asked of
            write(self.build_lib)


class Distributed(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write(base_dir)


setup(cmdclass={"build_py": Built, "sdist": Distributed})
