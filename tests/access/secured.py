"""A broker and an object store as deploy/compose.security.yaml sets them up, as processes: with its
settings, certificates and users, and the rights of deploy/access/rights.json (`secured`).
"""

import os
import re
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from testbed.repository import ROOT
from testbed.servers import use
from testbed.servers.kafka_broker import VERSION, KafkaBroker
from testbed.servers.versity import VersityGW
from testbed.waiting import WAIT_S
from tests.compose.compose_file import filled

FILE = ROOT / "deploy" / "compose.security.yaml"
ACCESS = ROOT / "deploy" / "access"
RUN, BUCKET = "secured", "rollstream"
INSIDE = "/run/access"  # of a container
LISTENERS = {"ADMIN": "PLAINTEXT", "CLIENT": "SECURE"}
"""The file's names, and those that the testbed's broker has for its listeners."""


@dataclass(frozen=True)
class Secured:
    """Both servers, and the folder of all secrets."""

    broker: KafkaBroker
    objects: VersityGW
    secrets: Path
    calls: Path
    """The object store's log of all requests."""

    @property
    def settings(self) -> list[str]:
        """The URLs of a run."""
        ca = self.secrets / "look" / "ca.pem"
        options = f"security=sasl_ssl&mechanism=scram-sha-512&ca={ca}"
        store = f"endpoint={self.objects.endpoint}&path_style=true&region=us-east-1"
        return [
            f"bus=kafka://127.0.0.1:{self.broker.secure_port}/{RUN}?{options}",
            f"store=s3://{BUCKET}/{RUN}?{store}",
        ]

    def environment(self, role: str) -> dict[str, str]:
        """The environment of a role's process, with the variables of the file; no secret is in
        it.
        """
        service = {"train": "trainer", "look": "report"}.get(role, role)
        given: Mapping[str, str] = _services()[service]["environment"]
        own = {
            name: value.replace(INSIDE, str(self.secrets / role))
            for name, value in given.items()
            if not name.startswith("ROLLSTREAM_")
        }
        assert own["KAFKA_USER"] == role
        home = {name: os.environ[name] for name in ("PATH", "HOME")}
        return {**home, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **own}

    def all_secrets(self) -> set[str]:
        """Every password and key; certificates are public."""
        found = {self.objects.secret_key}
        for file in self.secrets.glob("*/*"):
            text = file.read_text()
            if file.name == "kafka-password":
                found.add(text)
            if file.name == "aws-credentials":
                found.add(text.split("aws_secret_access_key = ")[1].strip())
            if "PRIVATE KEY" in text:
                found.add(text.splitlines()[1])
        return found


def _services() -> Mapping[str, Mapping[str, dict[str, str]]]:
    text = re.sub(r"\$\{(\w+):\?[^}]*\}", "given", FILE.read_text())
    return filled(yaml.safe_load(text), {})["services"]


def property_name(variable: str) -> str:
    """The property of server.properties that the image's variable sets."""
    name = variable.removeprefix("KAFKA_").lower()
    return re.sub("_+", lambda m: {1: ".", 2: "_", 3: "-"}[len(m[0])], name)


def _broker_lines(secrets: Path) -> str:
    """The file's settings of the broker; the testbed sets the addresses itself."""
    given = _services()["kafka"]["environment"]
    protocols = given["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"]
    for name, here in LISTENERS.items():
        protocols = protocols.replace(f"{name}:", f"{here}:")
    lines = [f"listener.security.protocol.map={protocols}"]
    for variable, value in given.items():
        name = property_name(variable)
        if re.match(r"listeners$|advertised|listener\.security|inter\.broker", name):
            continue
        for theirs, ours in LISTENERS.items():
            name = name.replace(
                f"listener.name.{theirs.lower()}.", f"listener.name.{ours.lower()}."
            )
        lines.append(f"{name}={value.replace(INSIDE, str(secrets / 'kafka'))}")
    return "\n".join(["", *lines, ""])


@contextmanager
def secured(folder: Path) -> Generator[Secured]:
    """Both servers with all users, rights and topics, while the block runs."""
    secrets, calls = folder / "access", folder / "calls.log"
    make = [sys.executable, str(ACCESS / "make_secrets.py"), str(secrets)]
    for _ in range(2):  # done again, it changes nothing
        subprocess.run(make, check=True)
    own = secrets / "object-store"
    variables = {
        "VGW_CERT": str(own / "cert.pem"),
        "VGW_KEY": str(own / "key.pem"),
        "VGW_IAM_DIR": str(folder / "accounts"),
        "VGW_ACCESS_LOG": str(calls),
    }
    (folder / "accounts").mkdir()
    with ExitStack() as stack:
        objects = VersityGW(variables, str(secrets / "admin" / "ca.pem"))
        stack.callback(objects.close)
        objects.start()
        broker = KafkaBroker(more=_broker_lines(secrets), secure=True)
        stack.callback(broker.close)
        broker.start()
        broker.wait_ready()
        _grant(broker, objects, secrets)
        use("access", f"Kafka {VERSION} with TLS and ACLs, VersityGW with HTTPS and policies")
        yield Secured(broker, objects, secrets, calls)


def _grant(broker: KafkaBroker, objects: VersityGW, secrets: Path) -> None:
    root = {"AWS_ACCESS_KEY_ID": objects.access_key, "AWS_SECRET_ACCESS_KEY": objects.secret_key}
    line = [sys.executable, str(ACCESS / "grant.py"), str(secrets), broker.server]
    for _ in range(2):  # done again, it changes nothing
        done = subprocess.run(
            [*line, objects.endpoint, BUCKET, RUN],
            env={**os.environ, "PYTHONPATH": str(ROOT), **root},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + broker.log()[-3000:]
