"""Drives the services of docker-compose.yml on a daemon (`Stack`), by compose v2 where
`docker compose` is there, else by Debian's `docker-compose` 1.29, which is installed once.

A service's process is killed by its id and not through the daemon, for which a kill is a manual
stop that no restart policy answers.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from testbed.repository import ROOT
from testbed.servers import use
from testbed.stack.daemon import StackDaemon, require, run_command
from testbed.waiting import WAIT_S, let_pass

PROJECT = "rollstream-stack"
ROLES = ("prompts", "dispatch", "trainer", "rollout", "archive", "eval")
"""The services that end with the run."""
SERVERS = ("kafka", "object-store", "report")
"""The services that stay."""
ADDED = ("score", "relay", "explorer", "observe", "prometheus")
"""The services of profiles; that of Grafana needs an image that cannot be made here."""
BUILD_S = 3600.0
BUILT_FROM = (
    *("pyproject.toml", "setup.py", "constraints.txt", "README.md", "streams", "storage"),
    *("producers", "consumers", "simulator", "rollstream", "examples", "deploy/Dockerfile"),
    *("deploy/vllm_cpu_needs.py", "deploy/make_bucket.py", "deploy/access"),
)
"""What deploy/Dockerfile copies, and itself."""
BUILT_WITH = ("REVISION", "TORCH_INDEX", "EXTRAS", "VLLM_CPU")
MADE_FROM = "rollstream.made-from"
"""The label of an image with the digest of what it is made from here."""


@dataclass(frozen=True)
class Container:
    """The state of one container: of its service `service`, with the id `pid` of its first process
    in the daemon's namespace (0 while it does not run) and the number of its restarts.
    """

    id: str
    service: str
    status: str
    health: str
    pid: int
    restarts: int
    exit_code: int

    @property
    def is_well(self) -> bool:
        """Healthy (one without a health check: running), or ended with its work done."""
        if self.status == "exited":
            return self.exit_code == 0
        return self.status == "running" and self.health in ("healthy", "none")


@dataclass
class Stack:
    """The services with `settings` added to the environment of every role (their names as
    `ROLLSTREAM_…`). `variables` are those that the compose file takes, like `CONFIG`; `more` are
    further files of this repository that change it, and `changes` has what a service has in place
    of the file's; both are read by each command.
    """

    daemon: StackDaemon
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    more: Sequence[str] = ()
    changes: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])

    def __post_init__(self) -> None:
        self._program = compose_program()
        version = run_command([*self._program, "version", "--short"], self._environment, WAIT_S)
        use("compose", version.strip())

    @property
    def _environment(self) -> dict[str, str]:
        return {**self.daemon.environment, **self.variables, "COMPOSE_DOCKER_CLI_BUILD": "0"}

    def compose(self, *words: str, timeout_s: float = WAIT_S) -> str:
        """Returns what the command prints on stdout."""
        override = self.daemon.folder / "override.json"
        override.write_text(json.dumps(self._override()))
        paths = (ROOT / "docker-compose.yml", *(ROOT / name for name in self.more), override)
        files = [word for path in paths for word in ("--file", str(path))]
        where = ("--project-name", PROJECT, "--project-directory", str(ROOT))
        line = [*self._program, *where, *files, *words]
        return run_command(line, self._environment, timeout_s)

    @property
    def image(self) -> str:
        return self.variables.get("IMAGE", "rollstream")

    @cached_property
    def made_from(self) -> str:
        """The digest of the files and variables of which the image is made, its label."""
        found = sha256(json.dumps([self.variables.get(name, "") for name in BUILT_WITH]).encode())
        for path in sorted(path for name in BUILT_FROM for path in _files(ROOT / name)):
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
        return found.hexdigest()

    def build(self) -> None:
        """Build the image, with the packages fetched over this machine's network."""
        self.compose("build", timeout_s=BUILD_S)

    def up(self, *words: str) -> None:
        """Start the services in the background; returns when each was started."""
        self.compose("up", "--detach", "--no-build", *words, timeout_s=BUILD_S)

    @contextmanager
    def without_data(self) -> Generator[None]:
        """Removes what an earlier run that was ended has left, and at the end all of this one."""
        self.down(with_data=True)
        try:
            yield
        finally:
            self.down(with_data=True)

    def down(self, with_data: bool = False) -> None:
        """Remove the containers and the network, and the volumes too if asked."""
        self.compose("down", "--timeout", "60", *(["--volumes"] if with_data else []))

    def containers(self, *services: str) -> list[Container]:
        """Returns the state of these services' containers, or of all."""
        own = ("--filter", f"label=com.docker.compose.project={PROJECT}")
        lasting = ("--filter", "label=com.docker.compose.oneoff=False")  # not those of `run`
        ids = self.daemon.docker("ps", "--all", "--quiet", *own, *lasting).split()
        found: list[Mapping[str, Any]]
        found = json.loads(self.daemon.docker("inspect", *ids)) if ids else []
        states = [_container(one) for one in found]
        return sorted(
            (one for one in states if not services or one.service in services),
            key=lambda one: (one.service, one.id),
        )

    def kill_first_process(
        self, container: Container, number: signal.Signals = signal.SIGKILL
    ) -> None:
        assert container.pid, f"{container.service} does not run"
        kill = [*self.daemon.inside("--pid"), "kill", f"-{number.value}", str(container.pid)]
        subprocess.run(kill, check=True)

    def replace(self, container: Container) -> None:
        """Stop the container and start another of its service as it is described now; the others
        of the service stay as they are.
        """
        count = len(self.containers(container.service))
        self.daemon.docker("stop", "--time", "60", container.id)
        self.daemon.docker("rm", container.id)
        scale = ("--scale", f"{container.service}={count}")
        self.up("--no-deps", "--no-recreate", *scale, container.service)

    def run(self, service: str, *words: str, timeout_s: float = WAIT_S) -> str:
        """Returns what a command prints in a new container like the service's."""
        return self.compose("run", "--rm", "--no-deps", "-T", service, *words, timeout_s=timeout_s)

    def logs(self, container: Container, lines: int = 60) -> str:
        done = subprocess.run(
            ["docker", "logs", "--tail", str(lines), container.id],
            env=self.daemon.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return f"--- {container.service} ({container.status}):\n{done.stdout}{done.stderr}"

    def describe(self) -> str:
        """Returns the ends of the logs of all containers that are not well."""
        return "\n".join(self.logs(one) for one in self.containers() if not one.is_well)

    def copy_out(self, container: Container, path: str, to: Path) -> None:
        self.daemon.docker("cp", f"{container.id}:{path}", str(to))

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns what compose makes of its files, by service; each `$` of a command is `$$`."""
        return yaml.safe_load(self.compose("config"))["services"]

    def _override(self) -> dict[str, object]:
        roles = (*ROLES, *ADDED[:-1], "bucket", "warmup", "report")
        settings = {f"ROLLSTREAM_{name}": value for name, value in self.settings.items()}
        services: dict[str, dict[str, object]] = {name: {"environment": settings} for name in roles}
        services["bucket"]["build"] = {"network": "host", "labels": {MADE_FROM: self.made_from}}
        for name, change in self.changes.items():
            services[name] = services.get(name, {}) | change
        return {"services": services}


def _files(path: Path) -> Iterator[Path]:
    """The files of a folder of sources, or the file itself."""
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path):
        if not folder.endswith("__pycache__"):
            yield from (Path(folder, name) for name in names)


def env_file(name: str) -> dict[str, str]:
    """Returns the variables of a file in deploy/stacks without the name of its project, which here
    is always the same.
    """
    lines = (ROOT / "deploy" / "stacks" / f"{name}.env").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    del given["COMPOSE_PROJECT_NAME"]
    return given


def compose_program() -> list[str]:
    """Returns the words that start compose."""
    v2 = ["docker", "compose"]
    if shutil.which("docker") is not None:
        done = subprocess.run([*v2, "version"], capture_output=True, check=False)
        if done.returncode == 0:
            return v2
    require([("docker-compose", "docker-compose")])
    return ["docker-compose"]


def wait_until(
    stack: Stack, services: Sequence[str], is_so: str, bound_s: float = WAIT_S
) -> list[Container]:
    """Waits until all containers of these services are `healthy`, or have `ended` with 0; returns
    them. Fails after `bound_s` with the ends of the logs.
    """
    end = time.monotonic() + bound_s
    while True:
        found = stack.containers(*services)
        missing = set(services) - {one.service for one in found}
        done = [one.is_well if is_so == "healthy" else _has_ended(one) for one in found]
        if not missing and all(done):
            return found
        if time.monotonic() > end:
            states = ", ".join(f"{one.service} {one.status} {one.health}" for one in found)
            raise AssertionError(f"not {is_so} in {bound_s:g} s: {states}\n{stack.describe()}")
        let_pass(0.5)


def _has_ended(container: Container) -> bool:
    return container.status == "exited" and container.exit_code == 0


def _container(found: Mapping[str, Any]) -> Container:
    state, config = found["State"], found["Config"]
    health = state.get("Health") or {"Status": "none"}
    return Container(
        id=found["Id"],
        service=config["Labels"]["com.docker.compose.service"],
        status=state["Status"],
        health=health["Status"],
        pid=state["Pid"],
        restarts=found["RestartCount"],
        exit_code=state["ExitCode"],
    )
