"""A real Docker daemon for tests of containers, and an image with this machine's Python.

It needs root and Debian's package `docker.io`, which is installed once. The daemon has a folder and
a socket of its own and no network; it is stopped by its own process id. The image is made of files
of this machine, so no registry is asked.
"""

import atexit
import functools
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from testbed.servers import install_packages, installing, use
from testbed.servers.guard import keep
from testbed.waiting import WAIT_S, let_pass

IMAGE = "rollstream-test-python:1"
PYTHON = Path("/usr/bin/python3")
_PROGRAMS = ("sh", "cat", "echo", "ls", "sleep", "true", "ln", "mkfifo", "mkdir", "seq")


@functools.cache
def daemon() -> str:
    """Returns the address of the one daemon of this process, which holds `IMAGE`; it is started at
    the first call and stopped with the process. `DOCKER_HOST` names it afterwards.
    """
    with installing():
        _install()
    folder = Path(tempfile.mkdtemp(prefix="rollstream-docker-"))
    address = f"unix://{folder / 'docker.sock'}"
    words = [
        *("dockerd", "--data-root", folder / "data", "--exec-root", folder / "exec"),
        *("--pidfile", folder / "pid", "--host", address, "--bridge", "none"),
        *("--iptables=false", "--ip6tables=false"),
    ]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    atexit.register(_stop, process, folder)
    keep(process.pid)
    os.environ["DOCKER_HOST"] = address
    if not wait_until_ready(process, os.environ):
        text = (folder / "log").read_text(errors="replace")
        raise RuntimeError(f"dockerd did not start:\n{text[-4000:]}")
    _import(folder / "image.tar")
    version = subprocess.run(["dockerd", "--version"], capture_output=True, text=True, check=True)
    use("Docker", f"{version.stdout.strip()} at {address}")
    return address


def _install() -> None:
    if shutil.which("dockerd") and shutil.which("docker"):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(
            "this test starts a Docker daemon: run it as root with dockerd installed"
        )
    install_packages(["docker.io"])


def wait_until_ready(process: subprocess.Popen[bytes], environment: Mapping[str, str]) -> bool:
    """Waits until the daemon that `DOCKER_HOST` of this environment names answers; False if its
    process ends before, or it does not answer in time.
    """
    end = time.monotonic() + WAIT_S
    while subprocess.run(["docker", "info"], env=environment, capture_output=True).returncode:
        if process.poll() is not None or time.monotonic() > end:
            return False
        let_pass(0.1)
    return True


def _stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)
    shutil.rmtree(folder, ignore_errors=True)


def _import(archive: Path) -> None:
    with tarfile.open(archive, "w") as tar:
        for path in sorted(set(_files())):
            tar.add(path.resolve(), arcname=str(path), recursive=False)
    command = ["docker", "import", str(archive), IMAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    archive.unlink()
    if done.returncode:
        raise RuntimeError(f"docker import failed:\n{done.stderr[-4000:]}")


def _files() -> Iterator[Path]:
    """Yields Python, its standard library, some programs, and the libraries that they load."""
    programs = [found for name in _PROGRAMS if (found := shutil.which(name))]
    library = Path("/usr/lib") / PYTHON.resolve().name
    modules = [
        path
        for path in library.rglob("*")
        if path.is_file() and not {"test", "__pycache__", "config"} & set(path.parts)
    ]
    loaded = [path for path in modules if path.suffix == ".so"]
    yield from (PYTHON, *map(Path, programs), *modules)
    yield from _libraries([PYTHON, *map(Path, programs), *loaded])


def _libraries(binaries: Iterable[Path]) -> Iterator[Path]:
    for binary in binaries:
        done = subprocess.run(["ldd", binary], capture_output=True, text=True)
        for word in done.stdout.split():
            if word.startswith("/"):
                yield Path(word)
