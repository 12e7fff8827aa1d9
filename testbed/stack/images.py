"""Makes the images that docker-compose.yml names where no registry is asked (`make_images`): a base
from Debian's packages in place of `python:3.12-slim`, and on it Kafka from the jars, VersityGW and
Prometheus from the binaries that the tests use anyway, started as the official images are.

So the stack's own files are tested, not the official images. The base has Debian's Python, which
is older than the file's. The mirror is read from apt and written into the image alone.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from testbed.recorded import PROGRAM_OF_2026_11_23, unpack
from testbed.servers import kafka_broker, prometheus, versity
from testbed.stack.compose import MADE_FROM, Stack
from testbed.stack.daemon import NoDaemon, StackDaemon, require

BASE = "python:3.12-slim"
KAFKA = f"apache/kafka:{kafka_broker.VERSION}"
OBJECTS = f"ghcr.io/versity/versitygw:{versity.VERSION}"
PROMETHEUS = "prom/prometheus:v3.5.0"
EARLIER, EARLIER_REVISION = "rollstream:earlier", "8a0139de"
PACKAGES = ("python3", "python3-venv", "ca-certificates")
HERE = Path(__file__).parent / "images"
BUILD_S = 1800.0
SERVERS: Mapping[str, tuple[str, Callable[[], Path]]] = {
    KAFKA: ("kafka", kafka_broker.jars),
    OBJECTS: ("versitygw", versity.program),
    PROMETHEUS: ("prometheus", lambda: prometheus.program("prometheus")),
}
"""The folder of each image's files, and what is fetched for it."""


@contextmanager
def built_daemon() -> Generator[StackDaemon]:
    """A daemon in a network of its own that has all images, while the block runs."""
    daemon = StackDaemon()
    try:
        build(Stack(daemon))
        yield daemon
    finally:
        daemon.close()


def build(stack: Stack) -> None:
    """Build the stack's image, and those of its servers, unless the daemon has them from the same
    files. For that the daemon is started again on this machine's network, where packages are. The
    image that this one replaces is removed.
    """
    daemon = stack.daemon
    daemon.stop()
    daemon.start(is_isolated=True)
    if not _lacking(daemon) and _label(daemon, stack.image) == stack.made_from:
        return  # the builder would read all of the packages to find that they are the same
    daemon.stop()
    daemon.start(is_isolated=False)
    make_images(daemon)
    name = ("image", "ls", "--quiet", "--no-trunc", stack.image)
    before = set(daemon.docker(*name).split())
    stack.build()
    replaced = sorted(before - set(daemon.docker(*name).split()))
    if replaced:  # 6 GB of each would stay; one from which another image was made does
        subprocess.run(["docker", "rmi", *replaced], env=daemon.environment, capture_output=True)
    daemon.stop()
    daemon.start(is_isolated=True)


def make_images(daemon: StackDaemon) -> None:
    """Make those of the four that the daemon lacks, or has from other files; it must be on this
    machine's network.
    """
    if not _has(daemon, BASE):
        _make_base(daemon)
    for tag in _lacking(daemon):
        name, part = SERVERS[tag]
        _build(daemon, tag, HERE / name, part(), _digest(HERE / name))


def _lacking(daemon: StackDaemon) -> list[str]:
    """The tags of the servers' images that the daemon does not have from the present files."""
    return [
        tag for tag, (name, _) in SERVERS.items() if _label(daemon, tag) != _digest(HERE / name)
    ]


def make_earlier(daemon: StackDaemon) -> None:
    """Make the image `EARLIER`: an archived program (`testbed/recorded`) with the packages of the
    present image, which states its revision in the ledger.
    """
    with tempfile.TemporaryDirectory(dir=daemon.folder) as scratch:
        part = Path(scratch)
        unpack(PROGRAM_OF_2026_11_23, part)
        (part / "rollstream" / "_revision.py").write_text(f'REVISION = "{EARLIER_REVISION}"\n')
        part.chmod(0o755)  # read by the image's user
        _build(daemon, EARLIER, HERE / "earlier", part, _digest(HERE / "earlier"))


def apt_sources() -> tuple[str, list[str]]:
    """Returns the code name of this Debian and the lines of its `main` for sources.list. Raises
    `NoDaemon` on another system.
    """
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if line
    )
    codename = release.get("VERSION_CODENAME", "").strip('"')
    form = "$(CREATED_BY) $(COMPONENT) deb $(REPO_URI) $(CODENAME) main"
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", form], capture_output=True, text=True, check=False
    )
    found = [line.split(" ", 2) for line in done.stdout.splitlines()]
    lines = [line for by, component, line in found if (by, component) == ("Packages", "main")]
    own = [line for line in lines if line.split()[2].partition("-")[0] == codename]
    if release.get("ID") != "debian" or not own:
        raise NoDaemon("the base image is made of Debian's packages: run this on Debian")
    return codename, own


def _make_base(daemon: StackDaemon) -> None:
    require([("debootstrap", "debootstrap")])
    codename, lines = apt_sources()
    mirror = next(line.split()[1] for line in lines if line.split()[2] == codename)
    with tempfile.TemporaryDirectory(dir=daemon.folder) as scratch:
        root = Path(scratch) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
        done = subprocess.run(
            [*command, codename, str(root), mirror], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NoDaemon(f"debootstrap failed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        (root / "etc/apt/sources.list").write_text("".join(f"{line}\n" for line in lines))
        for name in ("etc/ssl/certs/ca-certificates.crt", "etc/pip.conf"):
            if Path("/", name).is_file():  # of this machine, so that packages are fetched alike
                shutil.copy(Path("/", name), root / name)
        os.symlink("python3", root / "usr/bin/python")
        shutil.rmtree(root / "var/cache/apt/archives")
        archive = Path(scratch) / "base.tar"
        subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
        daemon.docker("import", str(archive), BASE)


def _digest(folder: Path) -> str:
    return sha256(b"".join(file.read_bytes() for file in sorted(folder.iterdir()))).hexdigest()


def _has(daemon: StackDaemon, tag: str) -> bool:
    return bool(daemon.docker("image", "ls", "--quiet", tag).strip())


def _label(daemon: StackDaemon, tag: str) -> str:
    """The image's label `MADE_FROM`; empty without one, and without the image."""
    form = f'{{{{index .Config.Labels "{MADE_FROM}"}}}}'
    words = ("image", "inspect", "--format", form, tag)
    return daemon.docker(*words).strip() if _has(daemon, tag) else ""


def _build(daemon: StackDaemon, tag: str, context: Path, part: Path, made_from: str) -> None:
    """Build the folder `context`, whose digest is `made_from`, with `part` (a file or a folder)
    beside its files.
    """
    with tempfile.TemporaryDirectory(dir=daemon.folder) as scratch:
        shutil.copytree(context, scratch, dirs_exist_ok=True)
        if part.is_dir():
            shutil.copytree(part, Path(scratch) / "part")
        else:
            shutil.copy(part, Path(scratch) / "part")
        label = ("--label", f"{MADE_FROM}={made_from}")
        words = ("build", "--network", "host", *label, "--tag", tag, scratch)
        daemon.docker(*words, timeout_s=BUILD_S)
