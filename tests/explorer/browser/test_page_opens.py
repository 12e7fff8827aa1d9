"""The page in a browser, quickly: the overview, and one trajectory reached by clicks."""

import pytest
from playwright.sync_api import expect


@pytest.mark.slow
def test_the_page_opens_and_leads_to_a_trajectory(watch, archive) -> None:
    page = watch(archive).open()
    expect(page.get_by_role("heading", name="remainder", level=1)).to_be_visible()
    expect(page.get_by_role("img", name="Reward: ")).to_be_visible()
    page.get_by_role("link", name="Steps").click()
    page.get_by_role("region", name="Steps").get_by_role("link", name="19").click()
    page.get_by_role("link", name="136.3").click()
    tokens = page.get_by_role("group", name="Tokens")
    expect(tokens).to_contain_text("074%22")
    tokens.locator("[data-n='55']").hover()
    token = page.get_by_role("complementary", name="Token")
    expect(token).to_contain_text("log-probability")
    expect(token).to_contain_text("v17")
