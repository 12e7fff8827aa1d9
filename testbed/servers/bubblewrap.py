"""The program `bwrap` for tests and measurements of sandboxes: this machine's, or Debian's package,
installed once if this process is root.
"""

import functools
import os
import shutil
import subprocess
from pathlib import Path

from testbed.servers import install_packages, installing, use

PACKAGE = "bubblewrap"


@functools.cache
def program() -> Path:
    """Returns the program's path. Raises `RuntimeError`, with the package to install, where it is
    missing and cannot be installed.
    """
    with installing():
        if shutil.which("bwrap") is None:
            _install()
    found = shutil.which("bwrap")
    assert found is not None
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    use("bubblewrap", f"{version.stdout.strip()} at {found}")
    return Path(found)


def _install() -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(
            "the tests run programs in a sandbox and `bwrap` is missing: install it (Debian: "
            "apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
        )
    install_packages([PACKAGE])
