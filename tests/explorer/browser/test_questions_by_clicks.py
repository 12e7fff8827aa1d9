"""The twelve questions of `docs/how-to/query-the-log.md`, answered by clicks alone from the
overview of the example archive; the numbers are those of that page.
"""

import re

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.slow


@pytest.fixture
def page(watch, archive) -> Page:
    return watch(archive).open()


def view(page: Page, name: str) -> None:
    page.get_by_role("navigation", name="Views").get_by_role("link", name=name).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(name)


def row(page: Page, table: str, name: str):
    """A row of a table or of bars that has the name."""
    named = page.get_by_role("table", name=table).or_(page.get_by_role("region", name=table))
    return named.get_by_role("row").filter(has_text=name).first


def test_1_how_did_reward_and_accuracy_move(page) -> None:
    accuracy = page.get_by_role("img", name="Held-out accuracy")
    expect(accuracy).to_have_attribute(
        "aria-label", re.compile(r"^Held-out accuracy: sampled \(T = 1\) 0\.76, greedy 0\.82")
    )
    view(page, "Steps")
    expect(row(page, "Steps", "20")).to_contain_text("0.81")


def test_2_which_prompts_are_never_solved(page) -> None:
    view(page, "Questions")
    table = page.get_by_role("region", name="Prompts that are never solved")
    expect(table.get_by_role("row").filter(has_text="064%11")).to_contain_text("160")
    table.get_by_role("link", name="142").click()
    expect(page.get_by_text("<bos>064%11")).to_be_visible()


def test_3_does_working_at_length_pay(page) -> None:
    view(page, "Questions")
    expect(row(page, "Reward by length", "20 to 40")).to_contain_text("0.83 · 299 answers")
    page.get_by_role("link", name="160 to 180").click()
    expect(page.get_by_role("status")).to_contain_text("61 of 1\u202f312")


def test_4_how_stale_was_what_was_trained(page) -> None:
    view(page, "Questions")
    expect(row(page, "Trained tokens by lag", "lag 1")).to_contain_text("14\u202f254 tokens")


def test_5_what_was_thrown_away_and_why(page) -> None:
    page.get_by_role("row").filter(has_text="filtered").get_by_role("link").first.click()
    expect(row(page, "Groups", "162")).to_contain_text("all rewards are 1")


def test_6_which_rollout_was_slow(page) -> None:
    view(page, "Questions")
    expect(row(page, "Speed of the rollouts", "rollout-1")).to_contain_text("30.2")
    view(page, "Weights")
    expect(row(page, "Seconds behind, by rollout", "rollout-0")).to_contain_text("20")


def test_7_is_the_policy_surer_when_it_is_right(page) -> None:
    view(page, "Questions")
    table = "Log-probability of right and wrong answers"
    expect(row(page, table, "right")).to_contain_text("−0.0351")
    expect(row(page, table, "wrong")).to_contain_text("−0.5476")


def test_8_how_does_it_answer_at_the_end_and_at_the_beginning(page) -> None:
    view(page, "Questions")
    expect(row(page, "Scores by version", "style/direct")).to_contain_text("60 %")
    expect(row(page, "Scores by version", "style/direct")).to_contain_text("6 %")


def test_9_how_long_from_an_answer_to_its_training(page) -> None:
    view(page, "Questions")
    card = page.get_by_role("region", name="How long from an answer to its training?")
    expect(card).to_contain_text("median 0.87\u202fs, 90 % 2.56\u202fs, longest 5.78\u202fs")


def test_10_how_often_does_a_prompt_teach_something(page) -> None:
    view(page, "Questions")
    expect(row(page, "Prompts by right answers", "8 of 8")).to_contain_text("28 prompts")
    page.get_by_role("link", name="0 of 8").click()
    expect(page.get_by_role("status")).to_contain_text("128 of 1\u202f312")


def test_11_one_trajectory_from_its_beginning_to_its_end(page) -> None:
    view(page, "Steps")
    page.get_by_role("link", name="19", exact=True).click()
    page.get_by_role("link", name="136.3").click()
    tokens = page.get_by_role("group", name="Tokens")
    expect(tokens).to_contain_text("v16 → v17")
    page.get_by_role("radio", name="log-probability").click()
    expect(tokens.locator("[data-n='55']")).to_have_class(re.compile(r"\bq8\b"))
    expect(page.get_by_role("region", name="What happened")).to_contain_text("step 19")


def test_12_which_records_closed_groups(page) -> None:
    view(page, "Steps")
    page.get_by_role("link", name="20", exact=True).click()
    dropped = row(page, "Dropped groups", "157")
    expect(dropped).to_contain_text("all rewards are 1")
    dropped.get_by_role("link", name="ledger 0:81").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("group_closed/1")
