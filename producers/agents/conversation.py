"""Finds the tokens of a program's request among those that an episode already has (`Conversation`):
tokens are never guessed (invariant 13).

A request names its history as messages. Its hash chain finds the answered turn that it continues.
The tokens behind that turn come from a renderer (`renderer_bridge`), else from the text that the
rendered messages have after its end; they are appended to the held tokens. Where neither is known,
or the history is another one, the tokens fork: a new path, which shares the longest common prefix
with a held one, counted by its cause.
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
"""Why a turn began a branch. `template`: the chat template renders the earlier messages in another
way than before. `retokenised`: the request has its history as text, whose tokens differ.
`history_rewritten`: it names an answer that no turn gave. `conversation`: it starts a history of
its own, or continues an earlier turn a second time.
"""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """States the tokens that a turn adds to an episode: `tokens` behind the token at flat index
    `at` (-1: a path of their own). `cause` is the cause of the fork, if the turn is one: that is
    decided when it begins (`Episode.is_fork`).
    """

    at: int
    tokens: Tokens
    cause: str


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """Holds the tokens of an episode's answered turns, with their sources and branches, and the
    log-probability of each generated one.
    """

    tokens: Tokens
    sources: Sources
    logprobs: Floats
    branches: tuple[Branch, ...]


def digest_of(body: JsonObject, idempotency_key: str = "") -> str:
    """Returns the digest of a request, equal for equal requests. How the answer is delivered
    (streamed or not) is no part of it.
    """
    kept = {name: value for name, value in body.items() if not name.startswith("stream")}
    text = json.dumps([kept, idempotency_key], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def history_hashes(messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[str]:
    """Returns the hash of the history up to each message: that before the first, which covers the
    tools, and then one per message.
    """
    hashes = [_hash("", json.dumps(tools, sort_keys=True))]
    for message in messages:
        hashes.append(_hash(hashes[-1], _canonical(message)))
    return hashes


def _hash(before: str, text: str) -> str:
    data = f"{before}\n{text}".encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _canonical(message: JsonObject) -> str:
    """Returns a text that is equal for messages of equal meaning: clients leave out empty fields,
    write a content as text or as parts, and write the arguments of calls again.
    """
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


def _arguments(given: object) -> object:
    """Returns the value of a call's arguments, which are JSON text or an object; other text as it
    is. JavaScript writes `1.0` as `1`.
    """
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        return json.loads(text, parse_float=_plain_number)
    except (ValueError, RecursionError):
        return given


def _plain_number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


@dataclass(slots=True)
class Conversation:
    """Holds the answered turns of one episode and finds the place of each request among their
    tokens. Turns that are generated meanwhile change no place: tokens are only ever added. `add`
    may run in another thread than the other calls: what it adds last is what they look up first.
    """

    chat: ChatFormat
    held: HeldTokens
    _by_digest: dict[str, Turn] = field(default_factory=dict[str, Turn])
    _by_history: dict[str, Turn] = field(default_factory=dict[str, Turn])

    def add(self, turns: Sequence[Turn], held: HeldTokens) -> None:
        """Add turns that are in the log; `held` are all tokens up to the last of them."""
        self.held = held
        for turn in turns:
            if turn.history:
                self._by_history[turn.history] = turn
            self._by_digest[turn.digest] = turn

    def answered(self, digest: str) -> Turn | None:
        """Returns the turn that answered a request of this digest."""
        return self._by_digest.get(digest)

    def plan(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        prompt: str | Sequence[int] | None,
    ) -> PlannedPrompt:
        """Returns the tokens that a request adds, of messages or of a prompt. Raises `ChatRefused`
        for messages that cannot be rendered.
        """
        if messages:
            return self.plan_messages(messages, tools)
        tokens = self.chat.encode(prompt) if isinstance(prompt, str) else prompt or ()
        return self.plan_tokens(tokens, isinstance(prompt, str))

    def plan_messages(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]
    ) -> PlannedPrompt:
        """Returns the tokens that these messages add to the episode. Raises `ChatRefused` if the
        messages cannot be rendered.
        """
        whole = self.chat.render(messages, tools, is_asked=True)
        found = self._parent(messages, tools)
        if found is None:
            claims = any(message.get("role") == "assistant" for message in messages)
            return self._fork(self.chat.encode(whole), REWRITTEN if claims else CONVERSATION)
        index, parent = found
        path = self.held.tokens[path_to(parent.end - 1, self.held.branches)].tolist()
        at = len(path) - (parent.end - parent.generated)
        added = self.chat.bridged(path[:at], path[at:], messages[index:], tools)
        if added is None:
            last = None if parent.finish == "length" else path[-1]
            text = self.chat.continuation(whole, messages, index, tools, last)
            if text is None:
                return self._fork(self.chat.encode(whole), TEMPLATE)
            added = self.chat.encode(text)
        return PlannedPrompt(parent.end - 1, np.array(added, np.uint32), CONVERSATION)

    def plan_tokens(self, prompt: Sequence[int], is_text: bool) -> PlannedPrompt:
        """Returns the tokens that a prompt of tokens adds; `is_text`: it was given as text, so that
        another tokenization of the same history is the likely cause of a fork.
        """
        return self._fork(prompt, RETOKENISED if is_text else REWRITTEN)

    def _parent(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]
    ) -> tuple[int, Turn] | None:
        """Returns the newest turn whose history this request continues, and the number of messages
        that it covers.
        """
        hashes = history_hashes(messages, tools)
        for count in range(len(messages), 0, -1):
            turn = self._by_history.get(hashes[count])
            if turn is not None:
                return count, turn
        return None

    def _fork(self, prompt: Sequence[int], cause: str) -> PlannedPrompt:
        """Returns the plan for a whole prompt: it continues the held path with the longest common
        prefix. That is no fork if the prompt contains a whole path up to an answer's end.
        """
        wanted, held = np.array(prompt, np.uint32), self.held
        best: tuple[int, int] = 0, -1  # length of the prefix, flat index of its last token
        for path in leaves(len(held.tokens), held.branches) if len(held.tokens) else []:
            tokens = held.tokens[path]
            most = min(len(tokens), len(wanted))
            differing = np.flatnonzero(tokens[:most] != wanted[:most])
            common = int(differing[0]) if len(differing) else most
            if common > best[0]:
                best = common, int(path[common - 1])
        length, at = best
        return PlannedPrompt(at, wanted[length:], cause)

    def path_length(self, plan: PlannedPrompt) -> int:
        """Returns the number of tokens of the path with the planned ones."""
        return len(path_to(plan.at, self.held.branches)) + len(plan.tokens)
