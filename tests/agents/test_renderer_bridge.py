"""Renderers bridge turns only with tokens that continue the held ones (invariant 13)."""

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.agents.chat_format import ChatFormat, PlainChat, TemplateChat
from rollstream.producers.agents.conversation import (
    Conversation,
    HeldTokens,
    PlannedPrompt,
    history_hashes,
)
from rollstream.producers.agents.renderer_bridge import RendererBridge, with_renderer
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.registry import load_task
from rollstream.streams.values import Turn
from testbed.agents.chat_tokenizer import THINKING, chatml_tokenizer

ASKED = {"role": "user", "content": "hello"}
NEXT = {"role": "user", "content": "and now?"}


@dataclass
class Given:
    token_ids: list[int]


@dataclass
class FakeRenderer:
    """Bridges as `bridge` says."""

    bridge: Callable[[list[int]], list[int] | None]
    asked: int = 0

    def render_ids(self, messages, *, tools=None, add_generation_prompt=False) -> list[int]:
        return []

    def bridge_to_next_turn(self, prompt, answer, messages, /, *, tools=None) -> Given | None:
        self.asked += 1
        found = self.bridge([*prompt, *answer])
        return None if found is None else Given(found)


def planned(
    chat: ChatFormat, answer: str, said: str | None = None
) -> tuple[list[int], PlannedPrompt]:
    """Returns the tokens of a first turn with this answer, and the plan of the second one."""
    prompt = chat.encode(chat.render([ASKED], (), is_asked=True))
    held = prompt + chat.encode(answer)
    reply = {"role": "assistant", "content": chat.decode(chat.encode(answer))}
    turn = Turn(
        digest="0", history=history_hashes([ASKED, reply], ())[-1], start=0,
        generated=len(prompt), end=len(held), finish="stop", waiting_s=0, generating_s=0,
        fork="", overridden=(), answer="",
    )  # fmt: skip
    count = len(held)
    tokens = HeldTokens(
        np.array(held, np.uint32), np.zeros(count, np.uint8), np.zeros(count, np.float32), ()
    )
    conversation = Conversation(chat, tokens)
    conversation.add([turn], tokens)
    asked = [ASKED, {**reply, "content": said or reply["content"]}, NEXT]
    return held, conversation.plan_messages(asked, ())


def built_in(bridge: Callable[[list[int]], list[int] | None]) -> tuple[TemplateChat, FakeRenderer]:
    fake = FakeRenderer(bridge)
    return TemplateChat(TextTokenizer(None), "hermes", RendererBridge(fake)), fake


def spliced() -> list[int]:
    return planned(TemplateChat(TextTokenizer(None), "hermes"), "yes<|end|>")[1].tokens.tolist()


def test_what_continues_the_held_tokens_is_used():
    chat, fake = built_in(lambda held: [*held, 7, 8])
    held, plan = planned(chat, "yes<|end|>")
    assert fake.asked == 1
    assert (plan.at, plan.tokens.tolist(), plan.cause) == (len(held) - 1, [7, 8], "conversation")


def raising(held: list[int]) -> list[int]:
    raise AssertionError("a special token is missing")


@pytest.mark.parametrize(
    "bridge",
    [
        lambda held: None,
        lambda held: held,
        lambda held: [*held[:-1], 7, 8],
        lambda held: [held[0] + 1, *held[1:], 7, 8],
        raising,
    ],
    ids=["refuses", "adds nothing", "trims the answer", "changes the prompt", "fails"],
)
def test_anything_else_is_spliced_by_the_template(bridge: Callable[[list[int]], list[int] | None]):
    chat, fake = built_in(bridge)
    held, plan = planned(chat, "yes<|end|>")
    assert fake.asked == 1
    assert (plan.at, plan.tokens.tolist(), plan.cause) == (len(held) - 1, spliced(), "conversation")


def test_a_rewritten_history_is_not_bridged():
    chat, fake = built_in(lambda held: [*held, 7, 8])
    _, plan = planned(chat, "yes<|end|>", said="no")
    assert fake.asked == 0
    assert plan.cause == "history_rewritten"


def test_what_neither_bridges_nor_splices_forks(tmp_path: Path):
    tokenizer = chatml_tokenizer(tmp_path, THINKING)
    chat = TemplateChat(tokenizer, "hermes", RendererBridge(FakeRenderer(lambda held: None)))
    assert planned(chat, "hm</think>\n\nyes<|im_end|>")[1].cause == "template"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "renderers", None)
    chat = TemplateChat(TextTokenizer(None), "hermes")
    for name in ("auto", "qwen3"):
        with pytest.raises(ConfigurationError, match=r"pip install 'rollstream\[renderers\]'"):
            with_renderer(chat, name)
    assert with_renderer(chat, "none") is chat


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs the library, and refuses every connection."""

    def refused(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["auto", "qwen3.5"])
def test_a_renderer_bridges_where_the_template_cannot(tmp_path: Path, name: str):
    plain = TemplateChat(chatml_tokenizer(tmp_path, THINKING), "hermes")
    answer = "hm</think>\n\nyes<|im_end|>"
    assert planned(plain, answer)[1].cause == "template"
    chat = with_renderer(plain, name)
    held, plan = planned(chat, answer)
    assert (plan.at, plan.cause) == (len(held) - 1, "conversation")
    after = "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert plan.tokens.tolist() == chat.encode(after)


@pytest.mark.usefixtures("offline")
def test_an_answer_that_was_cut_is_ended(tmp_path: Path):
    chat = with_renderer(TemplateChat(chatml_tokenizer(tmp_path, THINKING), "hermes"), "qwen3.5")
    _, plan = planned(chat, "hm</think>\n\nye")
    assert plan.tokens.tolist()[0] == chat.encode("<|im_end|>")[0]


@pytest.mark.usefixtures("offline")
def test_a_renderer_that_does_not_fit_is_refused(tmp_path: Path):
    built_in_chat = TemplateChat(TextTokenizer(None), "hermes")
    assert with_renderer(built_in_chat, "auto") is built_in_chat
    with pytest.raises(ConfigurationError, match=r"qwen3\.5' does not fit the built-in.*not found"):
        with_renderer(built_in_chat, "qwen3.5")
    other = THINKING.replace("<think>\n", "")
    chat = TemplateChat(chatml_tokenizer(tmp_path, other), "hermes")
    with pytest.raises(ConfigurationError, match=r"renders a message of user otherwise than"):
        with_renderer(chat, "qwen3.5")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "reason"),
    [("qwen9", "has no such renderer"), ("default", "bridges no turns"), ("gpt-oss", "downloads")],
)
def test_an_unknown_renderer_is_refused_with_the_known_ones(name: str, reason: str):
    chat = TemplateChat(TextTokenizer(None), "hermes")
    with pytest.raises(ConfigurationError, match=rf"{reason}.*choose one of none, auto,.*qwen3"):
        with_renderer(chat, name)


@pytest.mark.usefixtures("offline")
def test_a_task_without_a_chat_template_has_no_renderer():
    chat = PlainChat(load_task(TaskSettings()).tokenizer())
    assert with_renderer(chat, "auto") is chat
    with pytest.raises(ConfigurationError, match="needs a model with a chat template"):
        with_renderer(chat, "qwen3")
