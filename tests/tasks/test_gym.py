"""Data sets of reasoning_gym: any of them, disjoint splits, its own scores, errors that name the
fault.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollstream.errors import ConfigurationError
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Option, Teacher
from rollstream.producers.tasks.gym import Gym, pack, unpack
from rollstream.producers.tasks.registry import load_task


def gym(limit: int | None = None, **options: Option) -> Gym:
    task = load_task(TaskSettings(name="reasoning_gym", options=options), limit)
    assert isinstance(task, Gym)
    return task


def question(reference: str) -> str:
    return json.loads(reference)["question"]


SHORT = {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 4}


def test_any_position_may_be_asked_first_and_seeds_differ():
    first = [gym(**SHORT).prompt(1, position) for position in (0, 700, 3)]
    again = [gym(**SHORT).prompt(1, position) for position in (3, 700, 0)]
    assert first == again[::-1]
    assert gym(**SHORT).prompt(2, 700) != first[1]


def test_training_warm_up_and_held_out_questions_are_disjoint():
    """Also where a data set has few questions, such as three-letter words."""
    task = gym(dataset="spell_backward", min_word_len=3, max_word_len=3)
    training = {question(task.prompt(0, position).reference) for position in range(1500)}
    held_out = {question(prompt.reference) for prompt in task.held_out(60)}
    taught = {bytes(t for t in one.prompt if t < 256).decode() for one in task.documents(0, 500)}
    assert len(held_out) == 60
    assert not held_out & training
    assert not held_out & taught


def test_the_data_set_judges_its_own_answers():
    task = gym(**SHORT)
    assert isinstance(task, Teacher)
    prompt = task.prompt(0, 0)
    answer = json.loads(prompt.reference)["answer"]
    assert task.judge(prompt.reference, [[*answer.encode(), 258]]).reward == 1.0
    assert task.judge(prompt.reference, [[*b" ", *answer.encode()]]).reward == 1.0
    assert task.judge(prompt.reference, [[258]]).reward == 0.0


def test_only_what_is_tagged_is_judged_where_a_tag_is_asked_for():
    task = gym(dataset="gcd", answer_tag="answer")
    reference = task.prompt(0, 0).reference
    answer = json.loads(reference)["answer"]
    text = f"<answer>0</answer> no: <answer>{answer}</answer>.".encode()
    assert task.judge(reference, [[*text]]).reward == 1.0
    (document,) = task.documents(0, 1)
    assert bytes(t for t in document.response if t < 256).startswith(b"<answer>")


def test_an_entry_of_tuples_is_judged_in_another_process_as_here():
    """`rearc` compares tuples; `word_ladder` differs between processes of different hash seeds."""
    code = (
        "import sys, json; from tests.tasks.test_gym import gym\n"
        "for name, reference in json.loads(sys.stdin.read()).items():\n"
        "    answer = json.loads(reference)['answer']\n"
        "    print(gym(dataset=name).judge(reference, [[*answer.encode(), 258]]).reward)"
    )
    names = ("rearc", "word_ladder")
    references = {name: gym(dataset=name).prompt(0, 0).reference for name in names}
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(references),
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["1.0", "1.0"], done.stderr


def test_questions_that_are_too_long_are_passed_over():
    limit = 60
    lengths = {len(gym(limit, **SHORT).prompt(0, position).tokens) for position in range(50)}
    assert max(lengths) <= limit
    with pytest.raises(ConfigurationError, match=r"held out or too long; widen.*20 tokens"):
        gym(20, dataset="gcd").prompt(0, 0)


def test_more_held_out_questions_than_there_are_is_refused():
    with pytest.raises(ConfigurationError, match=r"100 asked for, gcd .* holds out \d+ different"):
        gym(dataset="gcd", min_value=1, max_value=9).held_out(100)


def test_a_data_set_without_answers_cannot_warm_up():
    with pytest.raises(ConfigurationError, match="graph_color gives no answers to learn from"):
        gym(dataset="graph_color").documents(0, 1)


def test_lists_become_the_tuples_that_a_data_set_wants():
    task = gym(dataset="polynomial_multiplication", variables=["v"])
    assert "v" in question(task.prompt(0, 0).reference)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "task.options of reasoning_gym: give dataset"),
        ({"dataset": "chain_som"}, "no data set 'chain_som'; did you mean 'chain_sum'"),
        ({"dataset": "zzzz"}, "there are ab, acre"),
        ({"dataset": "composite"}, 'task.name = "mixture" instead'),
        ({"dataset": "chain_sum", "min_term": 2}, "no parameter 'min_term'; did you mean 'min_te"),
        ({"dataset": "chain_sum", "seed": 2}, "seed is not given, it follows from the run's seed"),
        ({"dataset": "chain_sum", "size": 2}, "size is not given, the order has no end"),
        ({"dataset": "chain_sum", "min_terms": 9}, "max_terms must be >= min_terms"),
        ({"dataset": "chain_sum", "min_terms": 0}, "chain_sum refuses its parameters"),
        ({"dataset": "chain_sum", "min_terms": "two"}, "min_terms of chain_sum must be a number"),
        ({"dataset": "chain_sum", "allow_negation": "no"}, "must be true or false, got 'no'"),
    ],
)
def test_a_mistake_is_named(options: dict[str, Option], message: str):
    with pytest.raises(ConfigurationError) as caught:
        gym(**options)  # pyright: ignore[reportArgumentType]
    assert message in str(caught.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    with pytest.raises(ConfigurationError, match=r"pip install 'rollstream\[tasks\]'"):
        gym(**SHORT)


KEYS = st.one_of(st.text(max_size=4), st.integers(), st.just("$tuple"))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.fractions())
ENTRIES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=12,
)


@given(ENTRIES)
def test_entries_come_back_exactly_from_json(entry: Any):
    back = unpack(json.loads(json.dumps(pack(entry))))
    assert back == entry
    assert repr(back) == repr(entry)


def test_what_cannot_travel_is_named():
    with pytest.raises(ConfigurationError, match="holds a complex"):
        pack({"metadata": [1j]})
