"""The quickstart's task: splits, documents, rewards, styles, order."""

import json
import subprocess
import sys

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import Document
from rollstream.producers.tasks.character_tokenizer import EOS
from rollstream.producers.tasks.remainder import Remainder, question_text, response_text, style


def text(task: Remainder, tokens: tuple[int, ...]) -> str:
    return task.tokenizer().decode(tokens)


def answer_of(task: Remainder, one: Document) -> str:
    x, y = (int(part[::-1]) for part in text(task, one.prompt).split("%"))
    return f"{x % y:03d}"[::-1]


def test_the_example_of_the_documentation():
    assert question_text(633, 86) == "336%68"
    assert response_text(633, 86, 0) == "=130"
    assert response_text(633, 86, 2) == ">745>164=130"
    assert response_text(633, 86, 7) == ">745>164>573>982>302>711>130=130"


def test_no_prompt_is_in_two_splits():
    task = Remainder()
    held_out = {prompt.tokens for prompt in task.held_out(10_000)}
    warm_up = {one.prompt for one in task.documents(0, 5_000)}
    training = {task.prompt(0, position).tokens for position in range(5_000)}
    assert len(held_out) == 10_000
    assert not held_out & warm_up
    assert not held_out & training
    assert not warm_up & training


def test_every_document_of_every_style_gives_the_right_number_and_earns_the_reward():
    task = Remainder()
    documents = task.documents(3, 2_000)
    for one in documents:
        reference = json.dumps({"answer": answer_of(task, one)})
        score = task.judge(reference, [one.response])
        assert score.reward == 1.0
        shown = text(task, one.response)
        assert style(shown) == one.style
        assert score.scores == {f"style/{one.style}": 1.0}


def test_shares_of_the_styles_are_those_of_the_options():
    documents = Remainder(direct=0.2, jump=0.3).documents(0, 4_000)
    shares = {
        name: sum(one.style == name for one in documents) / 4_000 for name in ("direct", "jump")
    }
    assert shares["direct"] == pytest.approx(0.2, abs=0.03)
    assert shares["jump"] == pytest.approx(0.3, abs=0.04)


def test_a_wrong_number_an_unended_or_a_continued_answer_earns_nothing():
    task = Remainder()
    reference = json.dumps({"answer": "130"})

    def reward(response: str, *end: int) -> float:
        return task.judge(reference, [[*task.tokenizer().encode(response), *end]]).reward

    assert reward("=130", EOS) == 1.0
    assert reward(">000=130", EOS) == 1.0  # the working is not checked
    for response in ("=131", "=13", "=1300", "130", "=130=", "=031", ">130", ""):
        assert reward(response, EOS) == 0.0
    assert reward("=130") == 0.0
    assert reward("=130", EOS, EOS) == 0.0


@pytest.mark.parametrize(
    ("response", "name"),
    [
        ("=130", "direct"),
        (">745=130", "jump"),
        (">745>130=130", "full"),
        (">745>130=13", "other"),
        (">74>130=130", "other"),
        ("745=130", "other"),
        ("", "other"),
    ],
)
def test_style_of_a_response(response: str, name: str):
    assert style(response) == name


def test_the_order_is_a_pure_function_of_seed_and_position():
    first, second = Remainder(), Remainder()
    forward = [first.prompt(7, position) for position in range(50)]
    backward = [second.prompt(7, position) for position in reversed(range(50))]
    assert forward == backward[::-1]
    assert forward != [first.prompt(8, position) for position in range(50)]


def test_each_epoch_has_every_training_prompt_once_in_another_order():
    task = Remainder()
    count = next(p for p in range(30_000, 50_000) if task.prompt(0, p).epoch == 1)
    epochs = [
        [task.prompt(0, at).tokens for at in range(e * count, e * count + count)] for e in (0, 1)
    ]
    assert len(set(epochs[0])) == count
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]


def test_impossible_options_are_refused():
    with pytest.raises(ConfigurationError, match=r"direct = 0\.9 and jump = 0\.2"):
        Remainder(direct=0.9, jump=0.2)
    with pytest.raises(ConfigurationError, match="ask for no more"):
        Remainder().held_out(100_000)


def test_tasks_and_rewards_start_without_torch():
    code = (
        "import sys, rollstream.producers.rewards.process, rollstream.producers.tasks.remainder, "
        "rollstream.producers.tasks.scripted;"
        "sys.exit(any(heavy in sys.modules for heavy in ('torch', 'transformers', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
