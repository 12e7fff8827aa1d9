"""The pure path and the Hugging Face files give the same numbers."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollstream.producers.tasks.base import Tokenizer
from rollstream.producers.tasks.character_tokenizer import BOS, CharacterTokenizer
from rollstream.producers.tasks.remainder import CHARACTERS, Remainder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    CharacterTokenizer(CHARACTERS).save(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_the_vocabulary_has_18_tokens(saved: PreTrainedTokenizerBase):
    tokenizer: Tokenizer = Remainder().tokenizer()
    assert tokenizer.size == len(saved) == 18
    assert {name: getattr(saved, name) for name in tokenizer.special} == tokenizer.special


@given(st.text(alphabet=CHARACTERS, max_size=40))
def test_text_comes_back_from_both_paths(saved: PreTrainedTokenizerBase, text: str):
    fast = CharacterTokenizer(CHARACTERS)
    tokens = fast.encode(text)
    assert saved.encode(text, add_special_tokens=False) == tokens
    assert saved.encode(text) == [BOS, *tokens]
    assert fast.decode(tokens) == text
    assert saved.decode(tokens) == text


@given(st.text(alphabet=CHARACTERS + "aé \n", max_size=20))
def test_unknown_characters_are_the_same_in_both_paths(saved: PreTrainedTokenizerBase, text: str):
    assert saved.encode(text, add_special_tokens=False) == CharacterTokenizer(CHARACTERS).encode(
        text
    )


def test_numbers_outside_the_vocabulary_and_special_tokens_are_left_out(tmp_path: Path):
    fast = CharacterTokenizer(CHARACTERS)
    assert fast.decode([BOS, *fast.encode("12"), 2, 99]) == "12"
