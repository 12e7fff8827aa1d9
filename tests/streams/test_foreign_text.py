"""Text and JSON of other programs, clean where they enter; and records that must always encode."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from rollstream.errors import DecodeError
from rollstream.producers.prompt_source import PromptOrder
from rollstream.producers.tasks.base import TaskPrompt
from rollstream.streams.codec import decode, encode, encoding_problem
from rollstream.streams.foreign_text import (
    DEPTH_MAX,
    ForeignValueRefused,
    clean_json,
    clean_text,
    read_json,
    reason_text,
)
from rollstream.streams.records import Record
from rollstream.streams.values import Sampling
from testbed.hostile.records import hostile_records
from testbed.sample_records import SAMPLES

TEXTS = st.text(st.characters(exclude_categories=()), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(TEXTS)
def test_clean_text_can_be_encoded_and_clean_text_stays(text: str):
    clean = clean_text(text)
    clean.encode()
    assert clean_text(clean) == clean
    if not any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        assert clean == text


def test_two_halves_are_their_character_and_one_is_replaced():
    assert clean_text("a\ud83d\ude00b\ud83d") == "a\U0001f600b\ufffd"


@given(VALUES)
def test_clean_json_can_be_written_and_read(value: object):
    try:
        clean = clean_json(value)
    except ForeignValueRefused:
        return
    json.dumps(clean, ensure_ascii=False, allow_nan=False).encode()
    assert read_json(json.dumps(clean)) == clean


@pytest.mark.parametrize(
    "text",
    ["", "{", "NaN", "1e999", "[-Infinity]", "9" * 400, "9" * 5000, "[" * 100_000, b"\xff",
     "[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1)],
)  # fmt: skip
def test_json_that_no_record_can_hold_is_refused_with_a_reason(text: Any):
    with pytest.raises(ForeignValueRefused, match=r".{5}"):
        read_json(text)


def test_an_exception_without_a_text_has_a_reason():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert reason_text(Mute()) == "a Mute without a text"
    assert len(reason_text("x" * 10_000)) == 300


ODD: tuple[Any, ...] = (
    "\ud83d",
    math.nan,
    -math.inf,
    object(),
    {"a": "\ud83d"},
    ("\udc00",),
    10**400,
)


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: record.schema())
def test_whatever_a_field_holds_the_codec_raises_nothing_but_its_own_error(record: Record):
    for name in record.__struct_fields__:
        for odd in (*ODD, np.zeros((2, 2)), None):
            changed = replace(record, **{name: odd})
            problem = encoding_problem(changed)
            assert not problem or len(problem) > 5
            problem.encode()


def test_whatever_decodes_encodes():
    decoded = 0
    for hostile in hostile_records(39, 1500):
        try:
            record = decode(hostile.value).record
        except DecodeError:
            continue
        encode(record)
        decoded += 1
    assert decoded > 100


def order_of(prompt: Any) -> PromptOrder:
    return PromptOrder("odd", lambda seed, group: prompt, Sampling(), samples=2, seed=0)


def test_a_prompt_with_half_an_emoji_can_be_published():
    prompt = order_of(TaskPrompt((1, 2), '"\ud83d"', task="t\ud83d")).at(0)
    assert (prompt.reference, prompt.task) == ('"\ufffd"', "t\ufffd")
    encode(prompt)


@pytest.mark.parametrize("tokens", [(-1,), ("x",), (1 << 40,), ((1, 2), 3), None])
def test_a_prompt_that_cannot_be_made_is_named(tokens: Any):
    with pytest.raises(ValueError, match="prompt 7 of seed 0"):
        order_of(TaskPrompt(tokens, "")).at(7)
