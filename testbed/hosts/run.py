"""One run on two sites (`HostsRun`): its roles as processes of hosts, started again as an
orchestrator does, and what its rollouts do, second by second (`Sampler`).

Site A has prompts, dispatch, trainer, archive and a relay, each host of site B a relay and a
rollout. Only site A has the model on its disk; the others read it from the bucket.
"""

import http.client
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from rollstream.run.config.config import load
from rollstream.run.config.run_folder import folder_of_run, write_configuration
from rollstream.run.config.sources import METRICS_PORT
from rollstream.storage.relay.client import TOKEN_VARIABLE
from testbed.hosts.namespaces import DIES_WITH_US, NamespaceHost, enter_network
from testbed.hosts.sites import SITE_A, TwoSites
from testbed.run_driver import HERE, RunDriver, RunProcess, set_words
from testbed.waiting import WAIT_S

SITE_A_ROLES = ("relay-a", "prompts", "dispatch", "archive", "trainer")
"""The names of the processes of site A."""
RELAY_PORT, ROLLOUT_METRICS, RELAY_METRICS = 9470, 9464, 9465
SAMPLE_S = 0.25
PREFIX = "rollstream_rollout_"
Value = TypeVar("Value")


class SiteA:
    """The host that this process is on; processes die with this one."""

    def start(
        self, line: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return HERE.start([*DIES_WITH_US, *line], log, environment)


class HostsRun(RunDriver):
    """A new run of `configuration` with `settings`; its folder at site A is `base`/a. Hosts of
    site B have folders of their own, without the model. A role that dies is started again in each
    wait.
    """

    def __init__(
        self, sites: TwoSites, base: Path, configuration: Path, settings: Sequence[str] = ()
    ) -> None:
        places = [f"bus={sites.bus_url(base.name)}", f"store={sites.store_url(base.name)}"]
        relays = ["relay.enabled=true", f"relay.port={RELAY_PORT}"]
        given = [*settings, *places, *relays]
        super().__init__(base / "a", configuration, given, SiteA(), vital=())
        self.sites, self.base = sites, base
        base.mkdir(parents=True, exist_ok=True)
        loaded = load(configuration, [*given, f"folder={self.folder}"])
        write_configuration(folder_of_run(loaded), loaded)
        self.steps = loaded.trainer.steps
        self.gone: list[NamespaceHost] = []
        self.hosts: dict[str, NamespaceHost | None] = {}

    def make_model(self) -> None:
        """Make the model at site A and put it into the bucket."""
        words = [str(self.configuration), *set_words([*self.settings, f"folder={self.folder}"])]
        HERE.run("warmup", *words)
        HERE.run("put-model", str(self.folder / "model"), *words)

    def start_all(self) -> None:
        """Start all roles, relays before their rollouts."""
        self.hosts = dict.fromkeys(SITE_A_ROLES)
        for role in ("relay", "rollout"):
            self.hosts |= {f"{role}-{host.name}": host for host in self.sites.hosts}
        for name in self.hosts:
            self._start_role(name)

    def vanish(self, host: NamespaceHost) -> None:
        """Take the host off its network; its roles live on, and are not started again."""
        self.sites.vanish(host)
        self.gone.append(host)

    def tend(self) -> None:
        """Start every role again that has died."""
        for name, host in self.hosts.items():
            if self.newest(name).process.poll() not in (None, 0) and host not in self.gone:
                self._start_role(name)

    def wait_for(self, condition: Callable[[], Value | None], bound_s: float = WAIT_S) -> Value:
        def looked() -> Value | None:
            self.tend()
            return condition()

        return super().wait_for(looked, bound_s)

    def rest(self, seconds: float) -> None:
        """Tend to the roles for so long."""
        end_s = time.monotonic() + seconds
        self.wait_for(lambda: time.monotonic() >= end_s, seconds + WAIT_S)

    def wait_ended(self, bound_s: float = WAIT_S) -> None:
        """Wait until every role that is not gone has ended because the run is complete."""
        living = [name for name, host in self.hosts.items() if host not in self.gone]
        self.wait_for(lambda: all(self.newest(n).process.poll() == 0 for n in living), bound_s)

    def restarts(self) -> dict[str, int]:
        starts = Counter(one.name for one in self.processes)
        return {name: count - 1 for name, count in starts.items() if count > 1}

    def _start_role(self, name: str) -> RunProcess:
        host = self.hosts[name]
        site, address = ("a", SITE_A) if host is None else ("b", host.address)
        words = set_words([f"relay.site={site}", f"relay.host={address}"])
        words += [] if name == "trainer" else ["--until-complete"]
        port = 0 if host is None else RELAY_METRICS if "relay" in name else ROLLOUT_METRICS
        environment = {TOKEN_VARIABLE: "between-two-sites", METRICS_PORT: str(port)}
        folder = self.base / ("a" if host is None else host.name)
        return self.start(name, *words, host=host, folder=folder, environment=environment)


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

    def __init__(self, hosts: Sequence[NamespaceHost]) -> None:
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

    def _follow(self, host: NamespaceHost) -> None:
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
