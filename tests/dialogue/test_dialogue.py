"""Tasks and agents continue a dialogue by one mechanism, whatever the chat template's form, and
read the calls of the model's own format.
"""

from typing import Any, get_args

import numpy as np
import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.agents.answers import assistant_message
from rollstream.producers.agents.chat_format import ChatRefused, TemplateChat
from rollstream.producers.agents.conversation import Conversation, HeldTokens, history_hashes
from rollstream.producers.dialogue.chat_template import ChatTemplate
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.dialogue.tool_formats import TOOL_FORMATS, UNKNOWN, format_of_template
from rollstream.producers.tasks.text import TaskText
from rollstream.streams.values import Turn
from testbed.agents.template_forms import FORMS, TemplateForm, form_tokenizer

ASKED = {"role": "user", "content": "1 + x?"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
DAY = (
    "{{ 'Today: ' + strftime_now('%d %b %Y, %A') }}{% for m in messages %}{{ m.content }}"
    "{% endfor %}"
)


def with_template(template: str, **given: object) -> TextTokenizer:
    tokenizer = TextTokenizer(None)
    tokenizer.whole.chat_template = template
    for name, setting in given.items():
        setattr(tokenizer, name, setting)
    return tokenizer


def shown(tokenizer: TextTokenizer, tokens: object) -> str:
    return tokenizer.light.decode(list(tokens), skip_special_tokens=False)  # type: ignore[call-overload]


def called(chat: TemplateChat, form: TemplateForm) -> tuple[list[int], dict[str, Any]]:
    """The tokens of the form's call, and the message that an agent gets for them."""
    tokens = chat.encode(form.call)
    parsed = chat.parse(tokens, [TOOL], "call_")
    (call,) = parsed.tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
    function = {"name": call.name, "arguments": call.arguments}
    message = {"id": call.id, "type": "function", "function": function}
    return tokens, assistant_message(parsed.content, parsed.reasoning, (message,))


@pytest.mark.parametrize("name", FORMS)
def test_a_call_is_read_and_its_result_inserted_as_the_template_renders_it(name: str):
    form, tokenizer = FORMS[name], form_tokenizer(FORMS[name])
    chat = TemplateChat(tokenizer, format_of_template(form.template))
    tokens, said = called(chat, form)
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "42"}
    text = TaskText(tokenizer)
    assert tokens[-1] in text.stop
    assert sum(token in text.chat.stop for token in tokens) == 1  # no part of the answer ends it
    assert (
        shown(tokenizer, text.reply([result], [TOOL], said["tool_calls"], [tokens])) == form.reply
    )


@pytest.mark.parametrize("name", FORMS)
def test_an_agents_turn_continues_its_own_tokens_or_forks_with_its_cause(name: str):
    form, tokenizer = FORMS[name], form_tokenizer(FORMS[name])
    chat = TemplateChat(tokenizer, format_of_template(form.template))
    tokens, said = called(chat, form)
    prompt = chat.encode(chat.render([ASKED], [TOOL], is_asked=True))
    all_tokens = np.array([*prompt, *tokens], np.uint32)
    count = len(all_tokens)
    held = HeldTokens(all_tokens, np.zeros(count, np.uint8), np.zeros(count, np.float32), ())
    turn = Turn(
        digest="0", history=history_hashes([ASKED, said], [TOOL])[-1], start=0,
        generated=len(prompt), end=count, finish="tool_calls", waiting_s=0, generating_s=0,
        fork="", overridden=(), answer="",
    )  # fmt: skip
    conversation = Conversation(chat, held)
    conversation.add([turn], held)
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "42"}
    plan = conversation.plan_messages([ASKED, said, result], [TOOL])
    inserted = shown(tokenizer, plan.tokens.tolist())
    if name in ("qwen3", "qwen3.5", "deepseek-v3"):  # a thought is begun and left out later
        assert plan.cause == "template"
        whole = chat.render([ASKED, said, result], [TOOL], is_asked=True)
        assert shown(tokenizer, all_tokens[: plan.at + 1].tolist()) + inserted == whole
    else:
        assert (plan.cause, plan.at, inserted) == ("conversation", count - 1, form.reply)


def test_an_answer_that_was_cut_gets_the_end_that_the_template_writes():
    template = ChatTemplate(form_tokenizer(FORMS["qwen3"]))
    text = template.continuation([ASKED], (), [ASKED], (), None, has_ended=False)
    assert text.startswith("<|im_end|>\n<|im_start|>user\n1 + x?")


def test_the_token_with_which_another_role_would_begin_does_not_end_the_template_s_turn():
    tokenizer = form_tokenizer(FORMS["glm-4.5"])
    template = ChatTemplate(tokenizer)
    user = tokenizer.light.token_to_id("<|user|>")
    call = {"id": "0", "function": {"name": "add", "arguments": {"a": 1}}}
    result = {"role": "tool", "tool_call_id": "0", "content": "42"}
    assert template.continuation([ASKED], [call], [result], (), user).startswith("<|observation|>")


def test_a_role_that_the_template_leaves_out_is_refused():
    template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}<|end|>{% endfor %}"
    with pytest.raises(ConfigurationError, match="leaves out messages of the role tool"):
        TaskText(with_template(template)).reply([{"role": "tool", "content": "42"}])


WITH_SYSTEM = sorted(FORMS.keys() - {"glm-4.5"})  # whose form leaves out system messages


@pytest.mark.parametrize("name", WITH_SYSTEM)
def test_an_agent_gets_the_users_message_and_the_system_message(name: str):
    form, tokenizer = FORMS[name], form_tokenizer(FORMS[name])
    told = [{"role": "system", "content": "Be brief."}, ASKED]
    for system in ("", "Be brief."):  # of a row, of the task
        chat = TemplateChat(tokenizer, format_of_template(form.template), system=system)
        texts = []
        for messages in ([ASKED], told):
            prompt = chat.encode(chat.render(messages, (), is_asked=True))
            texts.append((chat.system_text(prompt), chat.user_text(prompt)))
        assert texts == [("", "1 + x?"), ("Be brief.", "1 + x?")]


def test_a_prompt_of_more_messages_stays_whole():
    chat = TemplateChat(TextTokenizer(None), "hermes")
    told = [{"role": "system", "content": "Be brief."}, ASKED, said_text("2"), ASKED]
    prompt = chat.encode(chat.render(told, (), is_asked=True))
    assert chat.system_text(prompt) == ""
    assert chat.user_text(prompt) == "Be brief.1 + x?21 + x?"


def said_text(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "arguments", ['{"a":2,"b":[1, 0.5]}', '{"b": [1.0, 0.5], "a": 2}', {"a": 2, "b": [1, 0.5]}]
)
def test_equal_arguments_are_an_equal_call(arguments: object):
    def hashes(given: object) -> list[str]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
        return history_hashes([ASKED, {"role": "assistant", "tool_calls": [call]}], [TOOL])

    assert hashes(arguments) == hashes('{"a": 2, "b": [1, 0.5]}')
    assert hashes(arguments) != hashes('{"a": 2, "b": [1, 0.25]}')


def test_tools_of_an_unknown_format_are_refused_by_name():
    template = "{% for tool in tools or [] %}{{ tool }}{% endfor %}{{ messages[0].content }}<|end|>"
    assert format_of_template(template) == UNKNOWN
    chat = TemplateChat(with_template(template), UNKNOWN)
    with pytest.raises(ChatRefused, match="not recognised; the known formats are hermes"):
        chat.render([ASKED], [TOOL], is_asked=True)
    assert chat.render([ASKED], (), is_asked=True)


def test_values_of_the_templates_own_variables_are_given_and_unknown_ones_refused():
    template = "{{ messages[0].content }}{{ '/nothink' if enable_thinking is false }}"
    text = TaskText(with_template(template, template_values={"enable_thinking": False}))
    assert text.render([ASKED], (), True) == "1 + x?/nothink"
    for name in ("enable_thinkin", "messages"):
        wrong = TaskText(with_template(template, template_values={name: False}))
        with pytest.raises(ConfigurationError, match=f"template_values: .*{name}'"):
            wrong.prompt([ASKED])


def test_the_runs_day_stands_in_its_prompts_on_every_day():
    text = TaskText(with_template(DAY, template_date="2026-02-03"))
    assert text.render([ASKED], (), True) == "Today: 03 Feb 2026, Tuesday1 + x?"


def test_agents_cannot_run_a_template_without_end_either():
    endless = "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}"
    chat = TemplateChat(with_template(endless), "hermes")
    with pytest.raises(ChatRefused, match="did not end within"):
        chat.render([ASKED], (), is_asked=True)


def test_verifiers_see_special_tokens_and_the_opened_thought_if_they_want_them():
    tokenizer = form_tokenizer(FORMS["qwen3"])
    turns = [tokenizer.encode("Hm.</think><|im_start|>5<|im_end|>")]
    answers = [
        TaskText(tokenizer, verifier_text=form).answer(turns)
        for form in ("plain", "special", "opened")
    ]
    assert answers == [
        "Hm.</think>5",
        "Hm.</think><|im_start|>5",
        "<think>\nHm.</think><|im_start|>5",
    ]


def test_every_format_can_be_chosen():
    field = AgentSettings.model_fields["tool_format"].annotation
    assert set(get_args(field)) == {"auto", *TOOL_FORMATS}
