"""docker-compose.yml as a test reads it: services with their variables filled in, and each one's
command, environment and health check for a process on this machine.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testbed.repository import ROOT

FILE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\$|\$\{(\w+):-([^}]*)\}")
FOLDER, PORT, REPORT_PORT = "/run/rollstream", "9464", "7462"
KAFKA, OBJECTS = "kafka:19092", "http://object-store:7070"
IMAGE_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # deploy/Dockerfile


@dataclass(frozen=True)
class Service:
    """One service of the file."""

    name: str
    settings: Mapping[str, Any]

    @property
    def is_role(self) -> bool:
        return str(self.settings.get("image", "")).split(":")[0] == "rollstream"

    @property
    def command(self) -> list[str]:
        return list(self.settings.get("command", ()))

    @property
    def environment(self) -> dict[str, str]:
        given = self.settings.get("environment", {})
        return {name: str(value) for name, value in given.items()}

    @property
    def after(self) -> dict[str, str]:
        """The services it waits for, and the condition of each."""
        given = self.settings.get("depends_on", {})
        return {name: how["condition"] for name, how in given.items()}

    @property
    def health(self) -> list[str]:
        """Its health check's command; none where there is no check."""
        check = self.settings.get("healthcheck", {})
        return [] if check.get("disable") else list(check.get("test", ()))[1:]

    @property
    def ends(self) -> bool:
        """Whether it does one task and ends, before the others start."""
        return self.name in ("bucket", "warmup")

    @property
    def profiles(self) -> list[str]:
        """The profiles that start it; a service without one always starts."""
        return list(self.settings.get("profiles", ()))


def services(given: Mapping[str, str] | None = None) -> dict[str, Service]:
    """All services, `${NAME:-default}` filled in from `given` and the defaults."""
    found = filled(yaml.safe_load(FILE.read_text()), given or {})["services"]
    return {name: Service(name, settings) for name, settings in found.items()}


def filled(value: Any, given: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: filled(one, given) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, given) for one in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda m: "$" if m[0] == "$$" else given.get(m[1]) or m[2], value)
    return value


@dataclass(frozen=True)
class Machine:
    """Replacements for the network and the volume of the file."""

    kafka: str
    objects: str
    folder: Path

    def placed(self, text: str, port: int) -> str:
        """A text of the file with this machine's addresses."""
        here = {KAFKA: self.kafka, OBJECTS: self.objects, FOLDER: str(self.folder), PORT: str(port)}
        return re.sub("|".join(map(re.escape, here)), lambda m: here[m[0]], text)

    def line(self, command: list[str], port: int) -> list[str]:
        return [self.placed(word, port) for word in command]

    def environment(self, service: Service, port: int) -> dict[str, str]:
        """Only the variables of image and file: nothing of the test's own environment."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = {name: self.placed(text, port) for name, text in service.environment.items()}
        home = {"PATH": path, "HOME": os.environ["HOME"]}
        return {**home, **IMAGE_ENVIRONMENT, **given}


def broker_settings(kafka: Service) -> str:
    """The broker's settings as lines of server.properties, without those of its addresses."""
    own = ("NODE_ID", "PROCESS_ROLES", "LISTENER", "ADVERTISED", "INTER_BROKER", "CONTROLLER")
    lines = [
        f"{name.removeprefix('KAFKA_').lower().replace('_', '.')}={value}"
        for name, value in kafka.environment.items()
        if not name.removeprefix("KAFKA_").startswith((*own, "LOG_DIRS"))
    ]
    return "\n".join(["", *lines, ""])
