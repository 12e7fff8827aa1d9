"""Parsers of text from the agents' side: requests, tool definitions, answers of a model, and chat
templates, which are programs that get the messages.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, cast

from rollstream.producers.agents.chat_format import JsonObject, TemplateChat
from rollstream.producers.agents.conversation import Conversation
from rollstream.producers.agents.episode import held_tokens
from rollstream.producers.agents.requests import (
    RequestRefused,
    failure_in,
    read_request,
    reward_in,
    scores_in,
)
from rollstream.producers.dialogue.tool_formats import TOOL_FORMATS
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.tasks.tool_calls import parse_tool_calls
from rollstream.streams.foreign_text import ForeignValueRefused, read_json
from rollstream.streams.values import Sampling
from testbed.agents.chat_tokenizer import THINKING, chatml_tokenizer
from testbed.agents.rollout import assignment, letters_format
from testbed.hostile import agents as odd
from testbed.hostile.parsers.parser import FuzzedParser

NUMBERS = 1 << 30
CHATML = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}: {{ tool | tojson }}\n"
    "{% endfor %}{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function.name + ' ' + call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for message in messages %}{% if loop.index0 % 2 == 0 and message.role != 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ message.content | trim }}]"
    "{% for call in message.tool_calls %}{% for name, given in call.function.arguments.items() %}"
    "{{ name | upper }}={{ given.text }}{% endfor %}{% endfor %}{% endfor %}"
)
"""Names what a message may lack."""
TEMPLATES = (CHATML, THINKING, STRICT)


def agent_parsers() -> Iterator[FuzzedParser]:
    """Yields the parsers of text from the agents' side."""
    yield FuzzedParser(
        "request for a turn", _body, lambda one, folder: _planned(one[0], one[1], "plain")
    )
    yield FuzzedParser("request by a chat template", _chat, lambda one, folder: (
        _planned("chat", one[1], one[0])
    ))  # fmt: skip
    yield FuzzedParser("end of an episode", _end, lambda data, folder: _ended(data))
    yield FuzzedParser("answer of a model", _text, lambda one, folder: _answer(*one), ())


def _body(drawn: Random) -> tuple[str, bytes]:
    route, data = odd.hostile_body(drawn.randrange(NUMBERS), 0)
    names: dict[str, str] = dict(
        zip(odd.ROUTES, ("chat", "completion", "response", "tokens"), strict=True)
    )
    return names[route], data


def _chat(drawn: Random) -> tuple[str, bytes]:
    made = drawn.choice((odd.hostile_tools, odd.hostile_chat))
    return drawn.choice(TEMPLATES), made(drawn.randrange(NUMBERS), 0)


def _end(drawn: Random) -> bytes:
    return odd.hostile_end(drawn.randrange(NUMBERS), 0)


def _text(drawn: Random) -> tuple[str, str]:
    return odd.hostile_text(drawn.randrange(NUMBERS), 0), drawn.choice([*TOOL_FORMATS])


def _read(data: bytes) -> JsonObject:
    try:
        body = read_json(data)
    except ForeignValueRefused as error:
        raise RequestRefused(str(error)) from error
    if not isinstance(body, dict):
        raise RequestRefused("no object")
    return cast("JsonObject", body)


@cache
def _format(template: str) -> Any:
    if template == "plain":
        return letters_format()
    with TemporaryDirectory() as folder:
        tokenizer = chatml_tokenizer(Path(folder), template)
        assert cast(Any, tokenizer.whole).chat_template  # read before the folder goes
    return TemplateChat(tokenizer, "hermes")


def _planned(route: Any, data: bytes, template: str) -> None:
    """Plans a request as the first turn, and as one that continues it."""
    request = read_request(route, _read(data), Sampling())
    running = RunningTrajectory.start(assignment(), None, 0.0, is_episode=True)
    conversation = Conversation(_format(template), held_tokens(running))
    planned = conversation.plan(request.messages, request.tools, request.prompt)
    assert planned is not None


def _ended(data: bytes) -> None:
    body: Any = _read(data)
    for text in (failure_in(body), *(scores_in(body) or ())):
        text.encode()
    reward = reward_in(body)
    assert reward is None or isinstance(reward, float)


def _answer(text: str, name: str) -> None:
    parsed = parse_tool_calls(text, name, [odd_tool()])
    for call in parsed.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        f"{call.name}{call.arguments}{call.id}".encode()
    parsed.content.encode("utf-8", "surrogatepass")


def odd_tool() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add"}}
