"""A run on two sites with a slow link between them, which is cut for a minute, and of which a host
vanishes: it is trained to its end, nothing is lost and nothing trained twice.

As root (`make test-hosts`): where namespaces cannot be made the tests fail and say why.
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.hosts.link import DELAY_S
from testbed.hosts.namespaces import NamespaceHost, network_of
from testbed.hosts.run import HostsRun
from testbed.hosts.sites import SITE_A, TwoSites, two_sites
from testbed.kills.final_counts import counted
from testbed.repository import ROOT

pytestmark = pytest.mark.long

CUT_S = 60.0
BOUND_S = 3600.0
EXAMPLES = {
    "quickstart": [
        "trainer.steps=20", "trainer.groups_per_step=8", "warmup.steps=200",
        "warmup.documents=5000", "rollouts.slots=24", "checkpoints.every=5",
        "evaluation.enabled=false",
    ],
    "longtail": [
        "trainer.steps=12", "trainer.groups_per_step=48", "rollouts.count=3",
        "dispatch.ready_groups_max=144", "paced.weights_bytes=8000000", "checkpoints.every=4",
    ],
}  # fmt: skip
"""The settings with which each example fits three hosts, and is not complete before everything was
tried.
"""


@pytest.fixture
def sites(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoSites]:
    """Both sites; site B does not see the folders of site A."""
    with two_sites([tmp_path / name / "a" for name in EXAMPLES]) as made:
        yield made


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_run_on_two_sites_outlives_a_cut_link_and_a_lost_host(
    sites: TwoSites, tmp_path: Path, example: str
) -> None:
    configuration = ROOT / "examples" / f"{example}.toml"
    run = HostsRun(sites, tmp_path / example, configuration, EXAMPLES[example])
    with run:
        run.make_model()
        for host in sites.hosts:  # the model reaches them through the store alone
            assert not any(Path(f"/proc/{host.pid}/root{run.folder}").iterdir())
        run.start_all()
        run.wait_for_step(2, BOUND_S)
        sites.link.cut()
        run.rest(CUT_S)
        sites.link.join()
        run.wait_for_step(run.step() + 2, BOUND_S)
        lost = sites.hosts[-1]
        run.vanish(lost)
        run.wait_for_step(run.step() + 2, BOUND_S)
        assert run.step() < run.steps, "the run was complete before everything was tried"
        lost.close()
        run.wait_ended(BOUND_S)
        found = counted(run.folder, run.steps)
    assert found.is_clean, found.wrong


def test_the_link_delays_and_can_be_cut(sites: TwoSites) -> None:
    """The other test would show nothing on a link that is none."""
    with socket.create_server((SITE_A, 0)) as server:
        port = server.getsockname()[1]
        first, second, third = sites.hosts
        began_s = time.monotonic()
        assert _reaches(first, port)
        assert time.monotonic() - began_s >= 2 * DELAY_S
        before = sites.link.counts()
        assert min(before.from_b[port], before.from_a[port]) > 0
        sites.link.cut()
        assert not _reaches(first, port)
        assert sites.link.counts() == before
        sites.link.join()
        assert _reaches(first, port)
        sites.vanish(third)
        assert not _reaches(third, port)
        assert _reaches(second, port)


def _reaches(host: NamespaceHost, port: int) -> bool:
    """Whether a process on the host can connect to the port at site A."""
    with network_of(host.pid), socket.socket() as probe:
        probe.settimeout(2.0)
        try:
            probe.connect((SITE_A, port))
        except OSError:
            return False
        return True
