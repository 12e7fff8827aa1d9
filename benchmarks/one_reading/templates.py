"""`templates`: how many of thirty public families of chat templates are served, in a dialogue of
three turns with a tool call, as a task and as an agent; `templates_silently_wrong`: how many insert
other tokens than transformers renders, or miss a call, without an error.

The reference is transformers' own rendering of the whole chat: what stands in it behind the
answer's last token. A template that takes no tools is served if it refuses them by name.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case, alone
from benchmarks.one_reading.template_families import (
    CALLS,
    FAMILIES,
    TemplateFamily,
    family_templates,
    family_tokenizer,
)
from rollstream.errors import ConfigurationError
from rollstream.producers.agents.answers import assistant_message
from rollstream.producers.agents.chat_format import TemplateChat
from rollstream.producers.agents.conversation import Conversation, HeldTokens, history_hashes
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.dialogue.tool_formats import format_of_template
from rollstream.producers.tasks.text import TaskText
from rollstream.producers.tasks.tool_calls import parse_tool_calls
from rollstream.streams.values import Turn

GOAL = 24.0
QUESTION, NEXT = "What is 2 + x?", "Thanks. And what else?"
RESULT, ANSWER, LAST = "RESULT 42", "The sum is ANSWER 42.", "LAST answer."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        },
    },
}
Message = Mapping[str, Any]


def cases(quick: bool) -> Iterator[Case]:
    """Yields both numbers; the quick form takes the templates that are written in this package."""
    served, wrong, refused = 0, list[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="rollstream-templates-") as name:
        templates = family_templates(Path(name), quick)
        for family in FAMILIES:
            if family.name not in templates:
                continue
            folder = Path(name) / family.name
            fate = family_fate(family, templates[family.name], folder)
            served += not fate
            (wrong if fate.startswith("wrong") else refused if fate else []).append(
                f"{family.name}: {fate}"
            )
    note = f"{served} of {len(templates)} families"
    goal = float(len(templates)) if quick else GOAL
    yield alone("templates", served, "families", at_least=goal, note="; ".join([note, *refused]))
    yield alone(
        "templates_silently_wrong", len(wrong), "families", at_most=0.0, note="; ".join(wrong)
    )


def family_fate(family: TemplateFamily, template: str, folder: Path) -> str:
    """Returns "" for a family that is served, else why not; a text that begins with `wrong` if
    nothing would have named it.
    """
    dialogue = _Dialogue(family, family_tokenizer(family, template, folder), template)
    try:
        dialogue.run()
    except ConfigurationError as error:
        return f"refused: {error}"
    except AssertionError as error:
        return f"wrong: {error}"
    return ""


@dataclass
class _Dialogue:
    """Plays the dialogue of one family: a question, a call and its result, an answer, and another
    question with its answer.
    """

    family: TemplateFamily
    tokenizer: TextTokenizer
    template: str
    held: list[int] = field(default_factory=list[int])
    turns: list[Turn] = field(default_factory=list[Turn])
    messages: list[Message] = field(default_factory=list[Message])
    forks: int = 0

    def run(self) -> None:
        """Raises `AssertionError` for what is wrong without an error of the product."""
        family = self.family
        self.text = TaskText(self.tokenizer)
        tools = [TOOL] if family.calls else []
        self.chat = TemplateChat(self.tokenizer, format_of_template(self.template))
        if family.calls:
            _same("the format of calls", self.chat.tool_format, family.calls)
        else:
            self._check_refusal()
        self.messages = [{"role": "user", "content": QUESTION}]
        prompt = self._reference(self.messages, tools)
        _same("the prompt", list(self.text.prompt(self.messages, tools)), self._tokens(prompt))
        self.held = self._tokens(prompt)
        self.conversation = Conversation(self.chat, self._held_tokens())
        for end in (family.end, family.call_end):
            number = self.tokenizer.light.token_to_id(end) if end else None
            assert number is None or number in self.text.stop, f"{end} does not end an answer"
        thought = "I think.\n</think>\n\n" if family.thinks else ""
        if family.calls:
            self._call(thought, tools)
        self._turn(thought, ANSWER, {"role": "user", "content": NEXT}, tools)
        self._turn(thought, LAST, {"role": "user", "content": QUESTION}, tools)

    def _check_refusal(self) -> None:
        """A template without tools is refused, unless it shows them."""
        tools = [TOOL]
        assert self.text.prompt(QUESTION, tools) == self.text.prompt(QUESTION), "tools are shown"

    def _call(self, thought: str, tools: Sequence[Message]) -> None:
        family = self.family
        written = thought + CALLS[family.calls]
        end = family.call_end or family.end
        tokens = self._tokens(written + end)
        assert not {*tokens[:-1]} & {*self.text.stop}, "a part of the answer ends it"
        parsed = self.chat.parse(tokens, tools, "call_")
        for name, calls in (
            ("the agent", parsed.tool_calls),
            (
                "the task",
                parse_tool_calls(self.text.written([tokens]), family.calls, tools).tool_calls,
            ),
        ):
            shown = [(call.name, call.arguments) for call in calls]
            _same(f"the calls for {name}", shown, [("add", '{"a": 2, "b": "x y"}')])
        (call,) = parsed.tool_calls
        message: dict[str, Any] = {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        result = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": RESULT}
        said = assistant_message(parsed.content, parsed.reasoning, (message,))
        self._check(tokens, said, result, tools, "x y", end, (message,))

    def _turn(self, thought: str, answer: str, further: Message, tools: Sequence[Message]) -> None:
        written = thought + answer
        if self.family.calls == "openai":
            written = (
                "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
                f"<|channel|>final<|message|>{answer}"
            )
        tokens = self._tokens(written + self.family.end)
        assert not {*tokens[:-1]} & {*self.text.stop}, "a part of the answer ends it"
        parsed = self.chat.parse(tokens, tools, "call_")
        if tools:
            _same("the content", parsed.content, answer)
        said = assistant_message(answer, parsed.reasoning, ())
        self._check(tokens, said, further, tools, answer, self.family.end, ())

    def _check(
        self,
        answer: Sequence[int],
        said: Message,
        further: Message,
        tools: Sequence[Message],
        sign: str,
        end: str,
        calls: Sequence[Message],
    ) -> None:
        """Continue the held tokens as an agent and as a task by one message."""
        start = len(self.held)
        self.held += answer
        history = [*self.messages, said]
        self.turns.append(
            Turn(
                digest=str(len(self.turns)),
                history=history_hashes(history, tools)[-1],
                start=start,
                generated=start,
                end=len(self.held),
                finish="stop",
                waiting_s=0,
                generating_s=0,
                fork="",
                overridden=(),
                answer="",
            )
        )
        self.conversation.add([self.turns[-1]], self._held_tokens())
        self.messages = [*history, further]
        whole = self._reference(self.messages, tools)
        if sign not in whole:  # a template that prints calls as the answer's text
            sign = CALLS[self.family.calls][-20:]
            said = {"role": "assistant", "content": CALLS[self.family.calls]}
            whole = self._reference([*self.messages[:-2], said, further], tools)
        tail = whole[whole.rindex(sign) + len(sign) :]
        closing = end if end in tail[: tail.find(str(further["content"]))] else ""
        closing = closing or self.family.closing or end
        assert closing in tail, f"the reference has no {closing}"
        expected = self._tokens(tail[tail.index(closing) + len(closing) :])
        reply = list(self.text.reply([further], tools, calls, [answer]))
        _same("the task's reply", self._shown(reply), self._shown(expected))
        plan = self.conversation.plan_messages(self.messages, tools)
        tokens = plan.tokens.tolist()
        if plan.cause == "template":
            common = plan.at + 1
            _same("the fork", self.held[:common] + tokens, self._tokens(whole))
            self.forks += 1
        else:
            _same("the agent's place", plan.at, len(self.held) - 1)
            _same("the agent's tokens", self._shown(tokens), self._shown(expected))
        self.held += expected

    def _reference(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        """Transformers' rendering, in the form that the template's maker documents: arguments as
        objects, but as text where the template joins texts.
        """
        given = [_for_reference(message, self.template, self.family) for message in messages]
        kwargs: dict[str, Any] = {"xml_tools": tools} if "xml_tools" in self.template else {}
        return str(
            self.tokenizer.whole.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]
                given,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **kwargs,
            )
        )

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer.light.encode(text, add_special_tokens=False).ids

    def _shown(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.light.decode(list(tokens), skip_special_tokens=False)

    def _held_tokens(self) -> HeldTokens:
        count = len(self.held)
        return HeldTokens(
            np.array(self.held, np.uint32), np.zeros(count, np.uint8),
            np.zeros(count, np.float32), (),
        )  # fmt: skip


def _for_reference(message: Message, template: str, family: TemplateFamily) -> dict[str, Any]:
    given = dict(message)
    is_text = family.calls in ("deepseek_v3", "phi4_mini_json")
    short = family.calls == "mistral"
    if calls := given.pop("tool_calls", None):
        given["tool_calls"] = [
            {
                **call,
                "id": call["id"],
                "function": {
                    "name": call["function"]["name"],
                    "arguments": call["function"]["arguments"]
                    if is_text
                    else json.loads(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    assert not short or len(str(given.get("tool_call_id", "abcdefgh1"))) == 9
    given["content"] = given.get("content") or ""
    return given


def _same(what: str, given: object, wanted: object) -> None:
    if given != wanted:
        raise AssertionError(f"{what}: {str(given)[-300:]!r}, not {str(wanted)[-300:]!r}")
