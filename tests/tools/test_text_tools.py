"""Turns of tools are rendered by the chat template, and a dialogue continues by its own tokens."""

import json
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.tasks.text import TaskText
from rollstream.producers.tasks.tool_calls import parse_tool_calls

BUILT_IN = TextTokenizer(None)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "3"}

QWEN = """\
{%- if tools %}{{- '<|system|>' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- '<|end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|user|><tool_response>\\n' + m.content + '\\n</tool_response><|end|>\\n' }}
{%- else %}{{- '<|' + m.role + '|>' + m.content }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{% endif %}
{{- '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""  # noqa: E501
FORGETFUL = """\
{%- for m in messages %}{{- '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' and loop.last %}{{- '<think></think>' }}{% endif %}
{{- m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""


def text_with(template: str, folder: Path) -> TaskText:
    BUILT_IN.save(folder)
    (folder / "chat_template.jinja").write_text(template)
    return TaskText(TextTokenizer(folder))


def shown(text: TaskText, tokens: tuple[int, ...]) -> str:
    return text.tokenizer.light.decode(list(tokens), skip_special_tokens=False)


def test_the_built_in_template_shows_tools_calls_and_results():
    text = TaskText(BUILT_IN, system="Be brief.")
    chat = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "tool_calls": [CALL]},
        RESULT,
    ]
    prompt = shown(text, text.prompt(chat, [TOOL]))
    assert prompt.startswith("<|begin|><|system|>Be brief.\n\nTools:\n" + json.dumps(TOOL))
    assert prompt.endswith(
        '<|end|><|user|>1+2?<|end|><|assistant|><tool_call>{"name": "add", "arguments": {"a": 1}}'
        "</tool_call><|end|><|user|><tool_response>3</tool_response><|end|><|assistant|>"
    )
    assert prompt.count("<|system|>") == 1


def test_a_call_that_the_built_in_template_renders_is_parsed_back():
    text = TaskText(BUILT_IN)
    rendered = text.render([{"role": "assistant", "content": "", "tool_calls": [CALL]}], (), False)
    (call,) = parse_tool_calls(rendered.partition("<|assistant|>")[2]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})


@pytest.mark.parametrize("template", [None, QWEN])
@pytest.mark.parametrize("calls", [(), (CALL,)])
def test_a_dialogue_continued_by_its_tokens_is_what_the_template_renders(
    template: str | None, calls: tuple[dict[str, object], ...], tmp_path: Path
):
    """Prompt, the model's own answer with its stop token, and the reply: no token is made twice."""
    text = TaskText(BUILT_IN) if template is None else text_with(template, tmp_path)
    asked = [{"role": "user", "content": "1+2?"}]
    answer = {"role": "assistant", "content": "Let me see.", "tool_calls": list(calls)}
    whole = text.prompt([*asked, answer, RESULT], [TOOL])
    prompt, reply = text.prompt(asked, [TOOL]), text.reply([RESULT], [TOOL], calls)
    generated = whole[len(prompt) : len(whole) - len(reply)]
    assert whole == prompt + generated + reply
    assert generated[-1] in text.stop
    assert sum(token in text.stop for token in generated) == 1


def test_a_template_that_changes_earlier_answers_still_continues(tmp_path: Path):
    text = text_with(FORGETFUL, tmp_path)
    reply = text.reply([{"role": "user", "content": "go on"}])
    assert shown(text, reply) == "<|user|>go on<|end|><|assistant|>"


def test_a_template_that_refuses_a_role_is_named():
    with pytest.raises(
        ConfigurationError, match="role judge is not system, user, assistant or tool"
    ):
        TaskText(BUILT_IN).prompt([{"role": "judge", "content": "?"}])


def test_tools_need_a_template():
    with pytest.raises(ConfigurationError, match=r'set task.template = "chat"'):
        TaskText(BUILT_IN, "plain").prompt("hi", [TOOL])
