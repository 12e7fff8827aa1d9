"""Entropy and mismatch of a real run in the browser: the torch engine sampled its tokens, `replay
--token-scores` scored them, and the page colours them and shows the numbers.
"""

import shlex

import pytest
from playwright.sync_api import Page, expect

from rollstream.run.cli.main import main
from testbed.explorer_server import serving
from tests.support.kept_run import made

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return made(tmp_path_factory.mktemp("runs") / "tiny", archive=True)


@pytest.fixture(scope="module")
def served(run):
    """The server lives while the scores are computed beside it, as that of a person does."""
    with serving([str(run)]) as server:
        yield server


def coloured(page: Page) -> int:
    """How many tokens have a colour of a ramp."""
    return page.locator(".t").evaluate_all(
        "all => all.filter(t => /(^| )[qlr][0-8]( |$)/.test(t.className)).length"
    )


def longest_of_one_version(served) -> str:
    """An answer over which weights changed attends to keys of the earlier ones: its later tokens
    differ by what the step changed, and not by rounding alone.
    """
    rows = served.json("r/0/search?finish=stop&order=-tokens")["rows"]
    return next(row["trajectory"] for row in rows if row["version"] == row["version_last"])


def test_scores_are_computed_by_the_command_that_the_page_names_and_then_shown(
    watch, served, run, monkeypatch
) -> None:
    origin = f"http://127.0.0.1:{served.port}"
    name = longest_of_one_version(served)
    page = watch(origin).open(f"#/r/0/trajectories/{name}")
    expect(page.get_by_role("radio", name="entropy")).to_have_count(0)
    command = page.locator("code.command").text_content() or ""
    assert command == f"rollstream replay tiny --token-scores --where trajectory={name}"

    monkeypatch.chdir(run.parent)
    assert main(shlex.split(command)[1:]) == 0
    page = watch(origin).open(f"#/r/0/trajectories/{name}")
    expect(page.locator("code.command")).to_have_count(0)
    tokens = served.json(f"r/0/trajectories/{name}")["tokens"]
    generated = [n for n, source in enumerate(tokens["source"]) if source == 1]
    assert max(abs(tokens["mismatch"][n]) for n in generated) < 1e-4

    page.get_by_role("radio", name="entropy").click()
    expect(page.get_by_role("radio", name="entropy")).to_have_attribute("aria-checked", "true")
    assert coloured(page) == sum(tokens["entropy"][n] >= 0.01 for n in generated) > 0
    page.locator(f"[data-n='{generated[0]}']").hover()
    token = page.get_by_role("complementary", name="Token")
    expect(token).to_contain_text(f"{tokens['entropy'][generated[0]]:.4f} nats")
    expect(token).to_contain_text("mismatch")
    page.get_by_role("radio", name="mismatch").click()
    expect(page.locator(".scale")).to_contain_text("below the engine")
