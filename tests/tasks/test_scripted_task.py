"""The scripted task of several turns."""

import json

import numpy as np
import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import Environment, Reply, turns_of
from rollstream.producers.tasks.character_tokenizer import EOS
from rollstream.producers.tasks.scripted import Scripted
from rollstream.streams.records import ENVIRONMENT, GENERATED, PROMPT

REFERENCE = json.dumps({"script": [7, 5, 9]})


def encoded(*texts: str) -> list[list[int]]:
    encode = Scripted().tokenizer().encode
    return [encode(text) for text in texts]


def test_it_is_an_environment():
    assert isinstance(Scripted(), Environment)


def test_the_environment_names_one_digit_per_turn_until_the_script_is_over():
    task = Scripted()
    first = task.reply(REFERENCE, "", encoded("7;"))
    assert first == Reply(tuple(encoded("5=")[0]), "2")
    second = task.reply(REFERENCE, first.state, encoded("7;", "5=", "2;"))
    assert second == Reply(tuple(encoded("9=")[0]), "3")
    assert task.reply(REFERENCE, second.state, encoded("7;", "5=", "2;", "9=", "1;")).tokens == ()


def test_the_end_token_ends_the_dialogue():
    assert Scripted().reply(REFERENCE, "", [[EOS]]).tokens == ()


def test_the_reward_is_the_share_of_right_totals():
    task = Scripted()
    assert task.judge(REFERENCE, encoded("7;", "5=", "2;", "9=", "1;")).reward == 1.0
    assert task.judge(REFERENCE, encoded("7;", "5=", "3;", "9=", "1;")).reward == pytest.approx(
        2 / 3
    )
    assert task.judge(REFERENCE, encoded("7;")).reward == pytest.approx(1 / 3)


def test_turns_are_cut_where_the_source_changes():
    tokens = np.arange(7, dtype=np.uint32)
    sources = np.array([PROMPT] * 2 + [GENERATED] * 2 + [ENVIRONMENT] + [GENERATED] * 2, np.uint8)
    assert turns_of(tokens, sources) == [[2, 3], [4], [5, 6]]
    assert turns_of(tokens[:2], sources[:2]) == [[]]
    assert turns_of(tokens, sources, starts=(1, 3, 4)) == [[2], [3], [4], [5, 6]]


def test_training_and_held_out_scripts_are_disjoint():
    task = Scripted(turns=2)
    held_out = {prompt.reference for prompt in task.held_out(8)}
    training = {task.prompt(0, position).reference for position in range(200)}
    assert not held_out & training
    with pytest.raises(ConfigurationError, match="give 1 to 5"):
        Scripted(turns=9)
