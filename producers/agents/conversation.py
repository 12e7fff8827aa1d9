"""Finds a request's tokens among those that an episode has (`Conversation`); none is guessed
(invariant 13).

What neither the history's hashes, a renderer nor the rendered text gives forks: a new path behind
the longest common prefix, counted by its cause.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollstream.producers.agents.chat_format import ChatFormat, JsonObject, text_of
from rollstream.streams.branches import leaves, path_to
from rollstream.streams.values import Branch, Floats, Sources, Tokens, Turn

TEMPLATE, RETOKENISED = "template", "retokenised"
REWRITTEN, CONVERSATION = "history_rewritten", "conversation"
FORK_CAUSES = (TEMPLATE, RETOKENISED, REWRITTEN, CONVERSATION)
"""Why a turn began a branch. `template`: the chat template renders the earlier messages otherwise
than before. `retokenised`: the history came as text, whose tokens differ. `history_rewritten`: it
names an answer that no turn gave. `conversation`: it starts its own history, or continues an
earlier turn a second time.
"""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """The tokens that a turn adds behind the token at flat index `at` (-1: a path of their own).
    `cause` counts if the turn forks, which is decided at its begin (`Episode.is_fork`).
    """

    at: int
    tokens: Tokens
    cause: str


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """The tokens of an episode's answered turns."""

    tokens: Tokens
    sources: Sources
    logprobs: Floats
    branches: tuple[Branch, ...]


def digest_of(body: JsonObject, idempotency_key: str = "") -> str:
    """Returns the digest of a request, equal for equal requests."""
    # The delivery of the answer (streamed or not) is no part of the request.
    fields = {name: value for name, value in body.items() if not name.startswith("stream")}
    text = json.dumps([fields, idempotency_key], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def history_hashes(messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[str]:
    """Returns the hashes before the first message (it covers the tools), and after each."""
    hashes = [_hash("", json.dumps(tools, sort_keys=True))]
    for message in messages:
        hashes.append(_hash(hashes[-1], _canonical(message)))
    return hashes


def _hash(before: str, text: str) -> str:
    data = f"{before}\n{text}".encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _canonical(message: JsonObject) -> str:
    # Messages of equal meaning differ: clients leave out empty fields, write a content as text or
    # parts, and write the arguments of calls again.
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    fields: list[Any] = [
        message.get("role"),
        text_of(message.get("content")),
        message.get("reasoning_content") or "",
        message.get("tool_call_id") or "",
        message.get("name") or "",
        calls,
    ]
    return json.dumps(fields, sort_keys=True)


def _call(call: JsonObject) -> list[Any]:
    function: JsonObject = call.get("function") or {}
    return [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: object) -> object:
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        # JavaScript writes `1.0` as `1`.
        return json.loads(text, parse_float=_plain_number)
    except (ValueError, RecursionError):
        return arguments


def _plain_number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


@dataclass(slots=True)
class Conversation:
    """Finds the place of each request among an episode's answered turns. Tokens are only added, so
    turns that are generated meanwhile change no place.
    """

    chat: ChatFormat
    held: HeldTokens
    _by_digest: dict[str, Turn] = field(default_factory=dict[str, Turn])
    _by_history: dict[str, Turn] = field(default_factory=dict[str, Turn])

    def add(self, turns: Sequence[Turn], content: HeldTokens) -> None:
        """Adds turns that are in the log; `content` are all tokens up to the last of them."""
        # Another thread may plan meanwhile: the entries that it looks up first are added last.
        self.held = content
        for turn in turns:
            if turn.history:
                self._by_history[turn.history] = turn
            self._by_digest[turn.digest] = turn

    def answered(self, digest: str) -> Turn | None:
        return self._by_digest.get(digest)

    def plan(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        prompt: str | Sequence[int] | None,
    ) -> PlannedPrompt:
        """Returns the tokens that a request of messages or of a prompt adds. Raises
        `ChatRefused`.
        """
        if messages:
            return self.plan_messages(messages, tools)
        tokens = self.chat.encode(prompt) if isinstance(prompt, str) else prompt or ()
        return self.plan_tokens(tokens, isinstance(prompt, str))

    def plan_messages(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]
    ) -> PlannedPrompt:
        """Returns the tokens that these messages add to the episode. Raises `ChatRefused`."""
        rendered = self.chat.render(messages, tools, is_asked=True)
        match = self._parent(messages, tools)
        if match is None:
            claims = any(message.get("role") == "assistant" for message in messages)
            return self._fork(self.chat.encode(rendered), REWRITTEN if claims else CONVERSATION)
        index, parent = match
        path = self.held.tokens[path_to(parent.end - 1, self.held.branches)].tolist()
        at = len(path) - (parent.end - parent.generated)
        added = self.chat.bridged(path[:at], path[at:], messages[index:], tools)
        if added is None:
            last = None if parent.finish == "length" else path[-1]
            text = self.chat.continuation(rendered, messages, index, tools, last)
            if text is None:
                return self._fork(self.chat.encode(rendered), TEMPLATE)
            added = self.chat.encode(text)
        return PlannedPrompt(parent.end - 1, np.array(added, np.uint32), CONVERSATION)

    def plan_tokens(self, prompt: Sequence[int], is_text: bool) -> PlannedPrompt:
        # A text's other tokenization is the likely cause of its fork.
        return self._fork(prompt, RETOKENISED if is_text else REWRITTEN)

    def _parent(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]
    ) -> tuple[int, Turn] | None:
        # The longest history first: its turn is the newest.
        hashes = history_hashes(messages, tools)
        for count in range(len(messages), 0, -1):
            turn = self._by_history.get(hashes[count])
            if turn is not None:
                return count, turn
        return None

    def _fork(self, prompt: Sequence[int], cause: str) -> PlannedPrompt:
        prompt_tokens, content = np.array(prompt, np.uint32), self.held
        # Continues the path with the longest common prefix; no fork if that is a whole path up to
        # an answer's end.
        best: tuple[int, int] = 0, -1  # length of the prefix, flat index of its last token
        for path in leaves(len(content.tokens), content.branches) if len(content.tokens) else []:
            tokens = content.tokens[path]
            overlap = min(len(tokens), len(prompt_tokens))
            differing = np.flatnonzero(tokens[:overlap] != prompt_tokens[:overlap])
            common = int(differing[0]) if len(differing) else overlap
            if common > best[0]:
                best = common, int(path[common - 1])
        length, at = best
        return PlannedPrompt(at, prompt_tokens[length:], cause)

    def path_length(self, plan: PlannedPrompt) -> int:
        return len(path_to(plan.at, self.held.branches)) + len(plan.tokens)
