"""Text becomes a prompt by the model's tokenizer and template, or by the built-in ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from transformers import AutoTokenizer

from rollstream.errors import ConfigurationError
from rollstream.producers.dialogue.text_tokenizer import END, TextTokenizer, byte_token
from rollstream.producers.tasks.text import TaskText

BUILT_IN = TextTokenizer(None)
ENDING = byte_token(END)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with the built-in tokenizer's files."""
    BUILT_IN.save(tmp_path)
    return tmp_path


def change(path: Path, **values: object) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


@given(st.text(max_size=60))
def test_every_text_comes_back_from_bytes(text: str):
    assert BUILT_IN.encode(text) == list(text.encode()) or "<|" in text
    assert BUILT_IN.decode(BUILT_IN.encode(text)) == text or "<|" in text


def test_bytes_that_are_no_text_decode_too():
    assert BUILT_IN.decode([0xFF, ord("a"), ENDING]) == "\ufffda"


def test_the_files_give_the_same_tokens_to_us_and_to_transformers(folder: Path):
    saved, theirs = TextTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Größe?"}]
    ours = TaskText(saved).prompt("Größe?")
    assert ours == TaskText(BUILT_IN).prompt("Größe?")
    assert list(ours) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert saved.size == BUILT_IN.size == 262
    assert dict(saved.special) == dict(BUILT_IN.special)
    assert saved.ends == BUILT_IN.ends == {ENDING}


def test_a_chat_prompt_ends_where_the_assistant_begins():
    tokens = TaskText(BUILT_IN, system="Be brief.").prompt("hi")
    shown = BUILT_IN.light.decode(list(tokens), skip_special_tokens=False)
    assert shown == "<|begin|><|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"


def test_a_system_message_of_the_row_stays_the_only_one():
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    assert TaskText(BUILT_IN, system="C").prompt(messages) == TaskText(BUILT_IN).prompt(messages)


def test_a_developers_message_is_the_system_message_of_templates_without_the_role():
    question = {"role": "user", "content": "B"}
    system, developer = ({"role": role, "content": "A"} for role in ("system", "developer"))
    expected = TaskText(BUILT_IN).prompt([system, question])
    for text in (TaskText(BUILT_IN), TaskText(BUILT_IN, system="C")):
        assert text.prompt([developer, question]) == expected


def test_messages_that_the_template_leaves_out_are_refused(folder: Path):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    shown = "{% for m in messages if m.role != 'system' %}"
    template = shown + "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    change(folder / "tokenizer_config.json", chat_template=template)
    text = TextTokenizer(folder)
    assert TaskText(text).prompt("hi")
    with pytest.raises(ConfigurationError, match="leaves out messages of the role 'system'"):
        TaskText(text, system="Be brief.").prompt("hi")


def test_a_plain_prompt_is_the_text_as_the_tokenizer_begins_it():
    assert TaskText(BUILT_IN, "plain").prompt("hi") == (byte_token("<|begin|>"), *b"hi")
    with pytest.raises(ConfigurationError, match=r'set task.template = "chat"'):
        TaskText(BUILT_IN, "plain").prompt([{"role": "user", "content": "hi"}])


def test_an_answer_is_the_text_before_its_end():
    text = TaskText(BUILT_IN)
    assert text.answer([[*b"no"], [*b"yes", ENDING]]) == "yes"
    assert text.answer([]) == text.answer([[]]) == ""
    assert text.response("yes") == (*b"yes", ENDING)


def test_answers_stop_at_every_end_that_the_files_name(folder: Path):
    change(folder / "generation_config.json", eos_token_id=[256, 260])
    assert TaskText(TextTokenizer(folder), "plain").stop == (256, ENDING, 260)


def test_answers_stop_at_the_templates_own_end_of_a_turn(folder: Path):
    """Base models' files name the end of a text; their template ends turns differently."""
    change(folder / "tokenizer_config.json", eos_token="<|pad|>")
    assert TaskText(TextTokenizer(folder)).stop == (256, ENDING)
    assert TaskText(TextTokenizer(folder)).response("y") == (ord("y"), ENDING)


def test_a_tokenizer_without_an_end_is_refused(folder: Path):
    change(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigurationError, match="set eos_token"):
        _ = TaskText(TextTokenizer(folder), "plain").stop


def test_a_tokenizer_without_chat_template_is_refused_by_name(folder: Path):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigurationError, match=r'no chat template; set task.template = "plain"'):
        TaskText(TextTokenizer(folder)).prompt("hi")
    assert TaskText(TextTokenizer(folder), "plain").prompt("hi")


def test_a_template_that_refuses_is_quoted(folder: Path):
    with pytest.raises(
        ConfigurationError, match="role poet is not system, user, assistant or tool"
    ):
        TaskText(TextTokenizer(folder)).prompt([{"role": "poet", "content": "hi"}])


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOPS.replace("BODY", ""), "did not end within 1,000,000 steps"),
        (LOOPS.replace("BODY", "x" * 100_000), "more than 67,108,864 characters"),
        ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "refuses"),
        (
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
            "{{ m(60) }}",
            "did not end within 1,000,000 steps",
        ),
        (
            "{% for a in [range(99999)] * 99999 recursive %}{{ loop(a) if a is iterable }}"
            "{% endfor %}",
            "did not end within 1,000,000 steps",
        ),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "raises to a power"),
        ("{% if 9 ** 9 %}{% unknown %}", "raises to a power"),
    ],
)
def test_a_template_without_an_end_is_refused(folder: Path, template: str, reason: str):
    (folder / "chat_template.jinja").write_text(template)
    text, trace = TaskText(TextTokenizer(folder)), sys.gettrace()
    with pytest.raises(ConfigurationError, match=reason):
        text.prompt("hi")
    assert sys.gettrace() is trace


def test_a_long_conversation_is_within_the_bounds(folder: Path):
    text = TaskText(TextTokenizer(folder))
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": "2 ** 3"} for at in range(20_000)]
    assert text.render(messages, (), True).count("2 ** 3") == len(messages)


def test_a_folder_without_tokenizer_or_with_a_broken_one_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"has no tokenizer.json.*task.tokenizer"):
        _ = TextTokenizer(tmp_path).size
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="cannot be read as a tokenizer"):
        _ = TextTokenizer(tmp_path).size


def test_a_prompt_has_no_more_tokens_than_is_likely():
    text = TaskText(BUILT_IN, system="Be brief.", prompt_tokens_max=300)
    for length in range(0, 400, 7):
        messages = "a" * length
        assert len(text.prompt(messages)) <= (text.likely_tokens_max(messages) or 0)
    assert (text.likely_tokens_max("short") or 999) < 300


def test_rewards_decode_without_transformers(folder: Path):
    """Prompts are made without torch, too."""
    code = (
        "import sys; from pathlib import Path;"
        "from rollstream.producers.tasks.text import TaskText;"
        "from rollstream.producers.dialogue.text_tokenizer import TextTokenizer;"
        f"text = TaskText(TextTokenizer(Path({str(folder)!r})));"
        "assert text.answer([[121, 258]]) == 'y'; assert 'transformers' not in sys.modules;"
        "assert text.prompt('hi'); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
