"""One run on two sites (`HostsRun`): its roles as processes of hosts, started again as an
orchestrator does, and what its rollouts do, second by second (`Sampler`).

Site A has prompts, dispatch, trainer, archive and a relay, each host of site B a relay and a
rollout. Only site A has the model on its disk; the others read it from the bucket.
"""

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from rollstream.run.config.config import load
from rollstream.run.config.run_folder import folder_of_run, write_configuration
from rollstream.run.config.sources import METRICS_PORT
from rollstream.storage.relay.client import TOKEN_VARIABLE
from testbed.hosts.namespaces import Host, enter_network
from testbed.hosts.sites import SITE_A, TwoSites
from testbed.run_process import steps_done
from testbed.waiting import WAIT_S, let_pass

SITE_A_ROLES = {
    "relay-a": "relay",
    "prompts": "prompts", "dispatch": "dispatch", "archive": "archive", "trainer": "train",
}  # fmt: skip
"""The processes of site A by name, each with its command."""
RELAY_PORT, ROLLOUT_METRICS, RELAY_METRICS = 9470, 9464, 9465
SAMPLE_S = 0.25
PREFIX = "rollstream_rollout_"


@dataclass
class HostRole:
    """One role's process on a host (None: site A). `restarts` counts its deaths."""

    name: str
    command: str
    host: Host | None
    process: subprocess.Popen[bytes]
    restarts: int = 0
    is_gone: bool = False

    @property
    def is_done(self) -> bool:
        return self.process.poll() == 0


@dataclass
class HostsRun:
    """A new run of `configuration` with `settings`; its folder at site A is `folder`/a. Hosts of
    site B have folders of their own, without the model.
    """

    sites: TwoSites
    folder: Path
    configuration: Path
    settings: Sequence[str] = ()
    roles: list[HostRole] = field(default_factory=list[HostRole])

    def __post_init__(self) -> None:
        name = self.folder.name
        self.settings = [
            *self.settings,
            f"bus={self.sites.bus_url(name)}",
            f"store={self.sites.store_url(name)}",
            "relay.enabled=true",
            f"relay.port={RELAY_PORT}",
        ]
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True)
        loaded = load(self.configuration, [*self.settings, f"folder={self.home()}"])
        write_configuration(folder_of_run(loaded), loaded)
        self.steps = loaded.trainer.steps

    def home(self, host: Host | None = None) -> Path:
        """The run's folder on a host."""
        return self.folder / ("a" if host is None else host.name)

    def make_model(self) -> None:
        """Make the model at site A and put it into the bucket."""
        self._command("warmup", str(self.configuration))
        self._command("put-model", str(self.home() / "model"), str(self.configuration))

    def start(self) -> None:
        """Start all roles, relays before their rollouts."""
        for name, command in SITE_A_ROLES.items():
            self._add(name, command, None)
        for host in self.sites.hosts:
            self._add(f"relay-{host.name}", "relay", host)
        for host in self.sites.hosts:
            self._add(f"rollout-{host.name}", "rollout", host)

    def vanish(self, host: Host) -> None:
        """Take the host off its network; its roles live on, and are not started again."""
        self.sites.vanish(host)
        for role in self.roles:
            role.is_gone = role.is_gone or role.host is host

    def tend(self) -> None:
        """Start every role again that has died."""
        for role in self.roles:
            if role.process.poll() not in (None, 0) and not role.is_gone:
                role.restarts += 1
                role.process = self._launch(role.name, role.command, role.host)

    def wait(self, condition: Callable[[], object], bound_s: float = WAIT_S) -> None:
        """Tend to the roles until the condition holds; fails after `bound_s`."""
        end_s = time.monotonic() + bound_s
        while not condition():
            self.tend()
            assert time.monotonic() < end_s, f"not within {bound_s:g} s\n{self.describe()}"
            let_pass(SAMPLE_S)

    def rest(self, seconds: float) -> None:
        """Tend to the roles for so long."""
        end_s = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= end_s, seconds + WAIT_S)

    def step(self) -> int:
        """The newest step of the trainer."""
        return steps_done(self.home())

    def wait_for_step(self, number: int, bound_s: float = WAIT_S) -> None:
        self.wait(lambda: self.step() >= number, bound_s)

    def wait_complete(self, bound_s: float = WAIT_S) -> None:
        """Wait until every role that is not gone has ended because the run is complete."""
        self.wait(lambda: all(role.is_done or role.is_gone for role in self.roles), bound_s)

    def restarts(self) -> dict[str, int]:
        return {role.name: role.restarts for role in self.roles if role.restarts}

    def role(self, name: str) -> HostRole:
        (found,) = [role for role in self.roles if role.name == name]
        return found

    def describe(self) -> str:
        """Returns the ends of the logs of all roles."""
        logs = [(role.name, self.logs / f"{role.name}.log") for role in self.roles]
        return "\n".join(f"--- {name}:\n{log.read_text()[-1500:]}" for name, log in logs)

    def end(self) -> None:
        """Kill the others."""
        for role in self.roles:
            if role.process.poll() is None:
                role.process.kill()
                role.process.wait(WAIT_S)

    def _add(self, name: str, command: str, host: Host | None) -> None:
        self.roles.append(HostRole(name, command, host, self._launch(name, command, host)))

    def _command(self, *words: str) -> None:
        settings = [*self.settings, f"folder={self.home()}"]
        line = [sys.executable, "-m", "rollstream", *words]
        line += [word for one in settings for word in ("--set", one)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stdout + done.stderr

    def _launch(self, name: str, command: str, host: Host | None) -> subprocess.Popen[bytes]:
        settings = [*self.settings, f"folder={self.home(host)}"]
        site, address = ("a", SITE_A) if host is None else ("b", host.address)
        settings += [f"relay.site={site}", f"relay.host={address}"]
        words = [] if command == "train" else ["--until-complete"]
        line = [sys.executable, "-m", "rollstream", command, str(self.configuration)]
        line += ["--name", name, *words, *(w for one in settings for w in ("--set", one))]
        port = 0 if host is None else RELAY_METRICS if command == "relay" else ROLLOUT_METRICS
        environment = {
            "OMP_NUM_THREADS": "1",
            TOKEN_VARIABLE: "between-two-sites",
            METRICS_PORT: str(port),
        }
        log = self.logs / f"{name}.log"
        if host is not None:
            return host.start(line, log, environment)
        with log.open("ab") as output:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *line],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )


@dataclass(frozen=True)
class RolloutSample:
    """A rollout's metrics at `time_s` (wall clock): its slots, those that run, and the
    tokens that it has generated.
    """

    time_s: float
    slots: float
    running: float
    tokens: float


class Sampler:
    """Reads the metrics of each host's rollout in its own network, whatever the link does, four
    times a second. `samples` has them by the name of the host.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.samples: dict[str, list[RolloutSample]] = {host.name: [] for host in hosts}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._follow, args=(host,)) for host in hosts]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def running(self) -> float:
        """The slots that run now, on all hosts."""
        return sum(found[-1].running for found in self.samples.values() if found)

    def slots(self) -> float:
        """The slots of all hosts; 0 until each has reported its own."""
        known = [found[-1].slots for found in self.samples.values() if found]
        return sum(known) if len(known) == len(self.samples) else 0.0

    def _follow(self, host: Host) -> None:
        with open(f"/proc/{host.pid}/ns/net") as network:
            enter_network(network.fileno())  # of this thread, until its end
        while not self._stop.wait(SAMPLE_S):
            try:
                self.samples[host.name].append(_sample())
            except (OSError, http.client.HTTPException, KeyError):
                continue  # it starts, or is gone


def _sample() -> RolloutSample:
    connection = http.client.HTTPConnection("127.0.0.1", ROLLOUT_METRICS, timeout=5)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }
    names = ("slots", "running", "tokens_generated_total")
    return RolloutSample(time.time(), *(values[PREFIX + name] for name in names))
