"""The page of simulated runs: the views that a simulation has, and a note of what it has not."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import expect

from rollstream.run.cli.main import main
from tests.explorer.browser.file_host import file_host
from tests.explorer.test_simulated import SIMULATION

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Two simulated runs, exported by the command and served as files."""
    work = tmp_path_factory.mktemp("simulated")
    (work / "cluster.toml").write_text(SIMULATION)
    assert main(["explore", str(work / "cluster.toml"), "--export", str(work / "demo")]) == 0
    with file_host(work / "demo") as origin:
        yield origin


def test_a_simulated_run_shows_what_it_has_and_says_what_it_has_not(watch, simulated, tmp_path):
    watched = watch(simulated)
    for view, words in (
        ("r/1/overview", "It has no trajectories"),
        ("r/1/steps", "tokens"),
        ("r/1/steps/5", "tokens by how many steps behind"),
        ("r/1/lanes", "share of the time in which the rollout decodes"),
        ("r/1/settings", "simulation.tokens_per_s"),
        ("compare?runs=0,1", "simulation.policy"),
    ):
        page = watched.open(f"#/{view}")
        name = f"{view.replace('/', '-').partition('?')[0]}.png"
        watched.picture(Path(os.environ.get("EXPLORER_PICTURES") or tmp_path) / "simulated" / name)
        expect(page.locator("main")).to_contain_text(words)
    expect(page.get_by_role("link", name="Weights")).to_have_count(0)
    expect(page.get_by_role("link", name="Swimlanes")).to_be_visible()
