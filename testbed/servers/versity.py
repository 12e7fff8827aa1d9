"""A real S3 server for tests and measurements: VersityGW over a temporary folder, on a free port of
127.0.0.1, stopped by its own process id.

`go install` builds it once (a minute) into `.servers/bin` of the repository. Where Go is missing
the error names the package to install; `STORE_TEST_S3=s3://bucket/prefix?endpoint=…` uses an
existing server instead, with the credentials of the environment.
"""

import atexit
import functools
import os
import secrets
import shutil
import ssl
import subprocess
import tempfile
import urllib.error
import uuid
from collections.abc import Mapping
from pathlib import Path

import boto3

from rollstream.http_proxies import open_direct
from rollstream.storage.stores.s3.address import parse_s3_url
from testbed.servers import CACHE, free_ports, installing, use
from testbed.servers.guard import keep
from testbed.waiting import wait_for

VERSION = "v1.8.0"
MODULE = "github.com/versity/versitygw/cmd/versitygw"
PROGRAM = CACHE / "bin" / f"versitygw-{VERSION}"
BUCKET = "rollstream"
EXISTING = "STORE_TEST_S3"


def program() -> Path:
    """The server's binary, built the first time."""
    with installing():
        if not PROGRAM.exists():
            _build()
    return PROGRAM


def _build() -> None:
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise RuntimeError(
            "the tests start a real S3 server and 'go' is missing: install Go 1.25 or newer "
            f"(Debian: apt install golang), or name a running server in {EXISTING}="
            "s3://bucket/prefix?endpoint=http://host:port"
        )
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PROGRAM.parent) as partial:
        command = [go, "install", f"{MODULE}@{VERSION}"]
        done = subprocess.run(
            command, env={**os.environ, "GOBIN": partial}, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        (Path(partial) / "versitygw").rename(PROGRAM)


class VersityGW:
    """One server and its bucket; `start` and `stop` may alternate, and its data stay until
    `close`. `host` is the address of this machine on which it listens. `more` are further variables
    (`VGW_…`), and `authority` is the file that signed the certificate among them: then it serves
    HTTPS.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        more: Mapping[str, str] | None = None,
        authority: str | None = None,
        parent: Path | None = None,
    ) -> None:
        """`parent` is the folder in which it makes its own."""
        self._more = dict(more or {})
        self._trust = ssl.create_default_context(cafile=authority)
        self._program = program()
        self._folder = _folder_with_attributes(parent)
        self.data = self._folder / "data"
        self.data.mkdir()
        self.access_key, self.secret_key = "rollstream", secrets.token_hex(16)
        (self.port,) = free_ports(1, host)
        self.address = f"{host}:{self.port}"
        self.endpoint = f"{'https' if authority else 'http'}://{self.address}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process and waits until it serves."""
        self._log = (self._folder / "server.log").open("ab")
        self._process = subprocess.Popen(
            [
                *(self._program, "--port", self.address, "--health", "/health", "--quiet"),
                *("posix", self.data),
            ],
            env={
                **os.environ,
                "ROOT_ACCESS_KEY": self.access_key,
                "ROOT_SECRET_KEY": self.secret_key,
                **self._more,
            },
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        log = self._folder / "server.log"
        wait_for(self._healthy, self._process, lambda: log.read_text(errors="replace")[-4000:])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def folder(self) -> Path:
        """The folder of its data and logs."""
        return self._folder

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None
            self._log.close()

    def close(self) -> None:
        """Stops the process and removes its data."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def set_credentials(self) -> None:
        """Put its keys into the environment, for boto3 and child processes."""
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            os.environ.pop(name, None)
        os.environ["AWS_ACCESS_KEY_ID"] = self.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = self.secret_key

    def make_bucket(self, name: str) -> None:
        client = boto3.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
        )
        client.create_bucket(Bucket=name)

    def _healthy(self) -> bool:
        try:
            url = f"{self.endpoint}/health"
            with open_direct(url, 5, self._trust) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


def _folder_with_attributes(given: Path | None) -> Path:
    """A new folder on a file system with extended attributes, where the server keeps metadata."""
    CACHE.mkdir(exist_ok=True)
    for parent in (given,) if given is not None else (Path(tempfile.gettempdir()), CACHE):
        folder = Path(tempfile.mkdtemp(prefix="rollstream-s3-", dir=parent))
        try:
            os.setxattr(folder, "user.rollstream", b"1")
        except OSError:
            folder.rmdir()
            continue
        return folder
    raise RuntimeError(
        "VersityGW needs a file system with extended attributes (ext4, xfs, tmpfs of Linux 6.6): "
        f"neither {tempfile.gettempdir()} nor {CACHE} has them; name a folder in TMPDIR"
    )


@functools.cache
def server() -> VersityGW:
    """The one server of this process, started at the first call and stopped with the process. Its
    credentials are in the environment afterwards, for boto3 and child processes.
    """
    started = VersityGW()
    atexit.register(started.close)
    started.start()
    keep(started.pid)
    started.set_credentials()
    started.make_bucket(BUCKET)
    use("VersityGW", f"{VERSION.removeprefix('v')} at {started.endpoint}")
    return started


def new_url(parameters: str = "") -> str:
    """The URL of an empty prefix on the real server: `STORE_TEST_S3`'s, or the one started here."""
    existing = os.environ.get(EXISTING)
    if existing is None:
        base, query = f"s3://{BUCKET}", f"endpoint={server().endpoint}"
    else:
        use(EXISTING, str(parse_s3_url(existing)))
        base, _, query = existing.partition("?")
    query = "&".join(part for part in (query, parameters) if part)
    return f"{base.rstrip('/')}/{uuid.uuid4().hex[:12]}" + (f"?{query}" if query else "")
