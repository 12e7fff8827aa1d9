"""docker-compose.yml as processes: every role's command with the environment of the file, over the
same broker and the same S3 server, in the order of the file's dependencies, until the model has
learnt and all roles have ended. In containers: tests/stack/.
"""

import signal
import statistics
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollstream.storage.metrics_file import read_metrics
from testbed.servers import free_ports, use
from testbed.servers.kafka_broker import VERSION, KafkaBroker
from testbed.servers.versity import VersityGW
from testbed.waiting import WAIT_S, wait_for
from tests.compose.compose_file import (
    REPORT_PORT,
    ROOT,
    Machine,
    Service,
    broker_settings,
    services,
)

ONCE_S = 600.0  # warm-up
LEARN_S = 600.0
STOP_S = 60.0
STEPS = 25  # of 60: the model learns in the first ten
RISE = 0.2  # of the mean reward; the quickstart gains .5


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Both servers as the file sets them up, without the bucket, which a service creates."""
    found = services()
    with ExitStack() as stack:
        broker = KafkaBroker(more=broker_settings(found["kafka"]))
        stack.callback(broker.close)
        broker.start()
        broker.wait_ready()
        objects = VersityGW()
        stack.callback(objects.close)
        objects.access_key = found["object-store"].environment["ROOT_ACCESS_KEY"]
        objects.secret_key = found["object-store"].environment["ROOT_SECRET_KEY"]
        objects.start()
        use("compose", f"Kafka {VERSION} at {broker.server}, VersityGW at {objects.endpoint}")
        yield Machine(broker.server, objects.endpoint, tmp_path / "volume")


class Containers:
    """Processes by service, each with its port and its log; killed by their ids at the end."""

    def __init__(self, machine: Machine, logs: Path) -> None:
        self._machine, self._logs = machine, logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}

    def start(self, service: Service) -> subprocess.Popen[bytes]:
        (port,) = free_ports(1)
        with (self._logs / f"{service.name}.log").open("ab") as output:
            process = subprocess.Popen(
                self._machine.line(service.command, port),
                cwd=ROOT,
                env=self._environment(service, port),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.running[service.name], self.ports[service.name] = process, port
        return process

    def log(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text()[-4000:]

    def is_healthy(self, service: Service) -> bool:
        """The result of the service's own health check."""
        port = self.ports[service.name]
        line = self._machine.line(service.health, port)
        environment = self._environment(service, port)
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, check=False)
        return done.returncode == 0

    def wait_healthy(self, service: Service) -> None:
        process = self.running[service.name]
        is_well = lambda: process.poll() == 0 or self.is_healthy(service)  # noqa: E731
        wait_for(is_well, process, lambda: f"{service.name}: {self.log(service.name)}")

    def stop(self, service: Service) -> int:
        """Stops as `docker compose stop` does; returns the exit code."""
        self.running[service.name].send_signal(signal.SIGTERM)
        return self.running[service.name].wait(STOP_S)

    def kill(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait(WAIT_S)

    def _environment(self, service: Service, port: int) -> Mapping[str, str]:
        shorter = {"ROLLSTREAM_TRAINER__STEPS": str(STEPS)}
        return {**self._machine.environment(service, port), **shorter}


def in_order(found: Mapping[str, Service]) -> list[Service]:
    """Starts the roles that are in no profile, each after those it waits for."""
    roles = {name: one for name, one in found.items() if one.is_role and not one.profiles}
    ordered: list[Service] = []
    while len(ordered) < len(roles):
        placed = {service.name for service in ordered}
        ready = [
            service
            for service in roles.values()
            if service not in ordered and service.after.keys() & roles.keys() <= placed
        ]
        assert ready, "services wait for each other"
        ordered += ready
    return ordered


@pytest.mark.long
def test_the_services_start_are_healthy_and_learn(tmp_path: Path, machine: Machine) -> None:
    """Every role with the file's command and environment only; the test changes just the number of
    steps.
    """
    containers = Containers(machine, tmp_path)
    try:
        ordered = in_order(services())
        for service in ordered:
            process = containers.start(service)
            if service.ends:
                assert process.wait(ONCE_S) == 0, containers.log(service.name)
        lasting = [service for service in ordered if not service.ends]
        for service in lasting:
            containers.wait_healthy(service)
        trainer = containers.running["trainer"]
        assert trainer.wait(LEARN_S) == 0, containers.log("trainer")
        assert containers.running["eval"].wait(LEARN_S) == 0, containers.log("eval")
        for name in ("prompts", "dispatch", "rollout", "archive"):
            assert containers.running[name].wait(LEARN_S) == 0, containers.log(name)
        report = services()["report"]
        wait_for(lambda: b"<html" in fetched(), None, lambda: containers.log("report"))
        assert containers.stop(report) == 0, containers.log("report")
    finally:
        containers.kill()
    assert_learnt(machine.folder)


def fetched() -> bytes:
    """The page of the service `report`; nothing before the run is complete."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{REPORT_PORT}/", timeout=30) as answer:
            return answer.read()
    except urllib.error.HTTPError:
        return b""


def assert_learnt(folder: Path) -> None:
    lines = read_metrics(folder / "metrics" / "trainer.jsonl")
    rewards = [line["reward_mean"] for line in lines]
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + RISE, rewards
    evaluated = {line["step"]: line for line in read_metrics(folder / "metrics" / "eval.jsonl")}
    assert evaluated[STEPS]["accuracy_sampled"] > evaluated[0]["accuracy_sampled"] + RISE
