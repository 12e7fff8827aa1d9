"""The task with a long tail: parsing, splits, documents, rewards, lengths by prompt; and its
example, `examples/longtail-model.toml`.
"""

import json

import numpy as np
import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.automaton import (
    STEPS_MAX,
    Automaton,
    question_text,
    response_text,
    style,
)
from rollstream.producers.tasks.base import Document, TaskPrompt
from rollstream.producers.tasks.character_tokenizer import EOS
from rollstream.producers.tasks.registry import load_task
from rollstream.run.config.config import load
from testbed.repository import EXAMPLES

EXAMPLE = EXAMPLES / "longtail-model.toml"


def question(task: Automaton, tokens: tuple[int, ...]) -> tuple[int, int]:
    """The steps and the first state of a prompt."""
    text = task.tokenizer().decode(tokens)
    return int(text[2::-1]), "abcdefg".index(text[3])


def steps_of(task: Automaton, prompts: list[TaskPrompt]) -> list[int]:
    return [question(task, prompt.tokens)[0] for prompt in prompts]


def whole(one: Document) -> bool:
    return one.response[-1] == EOS


def test_the_example_of_the_documentation() -> None:
    assert question_text(512, 2) == "215c"
    assert response_text(3, 2) == "200d100e000f!f"
    assert response_text(3, 2, pace=2) == "100E000F!F"
    assert response_text(3, 2, carried=False) == "200-100-000-!f"
    assert response_text(3, 2, pace=2, carried=False) == "100=000=!F"


def test_every_question_has_one_answer_whatever_the_way() -> None:
    for steps in (3, 4, 7, 8, 99, 100, 998, STEPS_MAX):
        for state in (0, 6):
            last = {
                response_text(steps, state, pace, carried)[-2:].lower()
                for pace in (1, 2)
                for carried in (True, False)
            }
            assert last == {"!" + "abcdefg"[(state + steps) % 7]}


@pytest.mark.parametrize(
    ("response", "name"),
    [
        ("200d100e000f!f", "carried"),
        ("100E000F!F", "carried"),
        ("999a!g", "carried"),  # the form alone counts
        ("200-100-000-!f", "bare"),
        ("200-100e000f!f", "other"),
        ("20d100e000f!f", "other"),
        ("200d100e000f!", "other"),
        ("200d100e000f!h", "other"),
        ("!f", "other"),
        ("", "other"),
    ],
)
def test_style_of_a_response(response: str, name: str) -> None:
    assert style(response) == name


def test_a_wrong_state_or_an_unended_answer_earns_nothing() -> None:
    task = Automaton()
    reference = json.dumps({"answer": "f"})

    def reward(response: str, *end: int) -> float:
        return task.judge(reference, [[*task.tokenizer().encode(response), *end]]).reward

    assert reward("200d100e000f!f", EOS) == 1.0
    assert reward("999a!f", EOS) == 1.0  # the lines are not checked
    assert reward("100E000F!F", EOS) == 1.0
    for response in ("200d100e000f!e", "200d100e000ff", "!f!", "!", "", "200d!ff"):
        assert reward(response, EOS) == 0.0, response
    assert reward("200d100e000f!f") == 0.0
    assert reward("200d100e000f!f", EOS, EOS) == 0.0
    cut = task.judge(reference, [task.tokenizer().encode("200d100e")])
    assert cut.scores == {"style/other": 1.0}


def test_whole_documents_earn_the_reward_and_excerpts_are_their_beginnings() -> None:
    task = Automaton(carried=0.4, by_two=0.25, excerpts=0.3, short=0.5)
    documents = task.documents(3, 1_500)
    for one in documents:
        steps, state = question(task, one.prompt)
        text = task.tokenizer().decode(one.response)
        pace = 2 if text[3] in "ABCDEFG=" else 1
        right = response_text(steps, state, pace, one.style == "carried")
        if whole(one):
            assert text == right
            reference = json.dumps({"answer": right[-1].lower()})
            score = task.judge(reference, [one.response])
            assert (score.reward, score.scores) == (1.0, {f"style/{one.style}": 1.0})
        else:
            assert right.startswith(text)
            assert 16 <= len(text) <= 64
    carried = np.mean([one.style == "carried" for one in documents])
    assert carried == pytest.approx(0.4, abs=0.05)
    cut = np.mean([not whole(one) for one in documents])
    assert cut == pytest.approx(0.3, abs=0.05)  # hardly any question is shorter than an excerpt


def test_lengths_follow_the_prompts_and_have_a_long_tail() -> None:
    task = Automaton(prompts=192, median=40, p99=700)
    steps = steps_of(task, [task.prompt(0, i) for i in range(192)])
    assert np.median(steps) == pytest.approx(40, abs=2)
    assert 12 <= np.quantile(steps, 0.99) / np.median(steps) <= 20
    assert 600 < max(steps) <= STEPS_MAX
    assert len(response_text(STEPS_MAX, 0)) + 5 < 4_096


def test_every_pass_asks_the_same_prompts_in_another_order() -> None:
    task = Automaton(prompts=40)
    passes = [[task.prompt(3, 40 * n + i) for i in range(40)] for n in range(2)]
    asked = [[one.tokens for one in each] for each in passes]
    assert len(set(asked[0])) == 40
    assert set(asked[0]) == set(asked[1])
    assert asked[0] != asked[1]
    assert [each[0].epoch for each in passes] == [0, 1]
    assert Automaton(prompts=40).prompt(3, 47) == passes[1][7]
    assert {task.prompt(4, i).tokens for i in range(40)} == set(asked[0])


def test_no_prompt_is_in_two_splits() -> None:
    task = Automaton(prompts=1_000)
    held_out = {prompt.tokens for prompt in task.held_out(800)}
    warm_up = {one.prompt for one in task.documents(0, 3_000)}
    training = {task.prompt(0, position).tokens for position in range(1_000)}
    assert len(held_out) == 800
    assert not held_out & warm_up
    assert not held_out & training
    assert not warm_up & training
    assert task.held_out(5) == task.held_out(800)[:5]


@pytest.mark.parametrize(
    "options",
    [
        {"prompts": 0},
        {"prompts": 100_000},
        {"median": 0.5},
        {"median": 700.0, "p99": 600.0},
        {"carried": 1.5},
        {"excerpts": -0.1},
        {"excerpts": 0.6, "short": 0.6},
        {"lines": 3},
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="automaton"):
        load_task(TaskSettings(name="automaton", options=options))  # pyright: ignore[reportArgumentType]


def test_more_held_out_prompts_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="ask for no more"):
        Automaton().held_out(100_000)


def test_the_example_passes_several_times_over_its_prompts_with_all_mechanisms_on() -> None:
    c = load(EXAMPLE, environment={})
    prompts, passes = c.task.options["prompts"], 11
    assert c.trainer.steps * c.trainer.groups_per_step == passes * int(str(prompts))
    assert (c.rollouts.engine, c.rollouts.count) == ("torch", 4)
    assert c.rollouts.on_update == "keep_version"
    assert c.dispatch.repack
    assert c.dispatch.placement == "ranks"
    assert c.dispatch.fill_tails
    assert c.rollouts.is_drafting


def test_a_right_answer_to_each_prompt_ends_by_itself_and_the_tail_is_long() -> None:
    c = load(EXAMPLE, environment={})
    task = load_task(c.task)
    lengths: list[int] = []
    for position in range(int(str(c.task.options["prompts"]))):
        prompt = task.prompt(0, position)
        steps = int(task.tokenizer().decode(prompt.tokens)[2::-1])
        lengths += [len(response_text(steps, 0, pace)) + 1 for pace in (1, 2)]
    assert max(lengths) <= c.sampling.tokens_max
    assert np.quantile(lengths, 0.99) >= 10 * np.median(lengths)
    assert c.sampling.tokens_max + len(task.prompt(0, 0).tokens) <= c.rollouts.context_max
