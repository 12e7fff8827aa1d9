"""Bridges an answer and the next turn with the library `renderers`, which appends to the held
tokens; these never change (invariant 13). No file is downloaded.
"""

import logging
from collections.abc import Sequence
from typing import Protocol, cast

from rollstream.errors import ConfigurationError
from rollstream.producers.agents.chat_format import (
    ChatFormat,
    ChatRefused,
    JsonObject,
    TemplateChat,
)

log = logging.getLogger(__name__)

NONE, AUTO = "none", "auto"
_UNUSABLE = {
    "default": "it bridges no turns",
    "gpt-oss": "it downloads its vocabulary when it starts",
}

_QUESTION: JsonObject = {"role": "user", "content": "What is 2 + 3?"}
_SYSTEM: JsonObject = {"role": "system", "content": "Be brief."}
_ANSWER: JsonObject = {"role": "assistant", "content": "5"}
_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
_CALL: JsonObject = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    ],
}
_RESULT: JsonObject = {"role": "tool", "tool_call_id": "c0", "name": "add", "content": "5"}


LIBRARY_ERRORS = (
    AssertionError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of renderers: they assert their needs of a tokenizer, and refuse messages."""


class BridgedTokens(Protocol):
    token_ids: list[int]


class Renderer(Protocol):
    def render_ids(
        self,
        messages: list[JsonObject],
        *,
        tools: list[JsonObject] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[JsonObject],
        /,
        *,
        tools: list[JsonObject] | None = None,
    ) -> BridgedTokens | None: ...


class RendererBridge:
    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def added_tokens(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        """Returns None if the renderer cannot bridge the messages, or changes the held tokens."""
        prefix = [*prompt, *answer]
        try:
            bridged = self._renderer.bridge_to_next_turn(
                list(prompt), list(answer), list(messages), tools=list(tools) or None
            )
        except LIBRARY_ERRORS as error:
            log.warning("the renderer failed at a turn: %s: %s", type(error).__name__, error)
            return None
        if bridged is None or bridged.token_ids[: len(prefix)] != prefix:
            return None
        return bridged.token_ids[len(prefix) :] or None


def with_renderer(chat: ChatFormat, name: str) -> ChatFormat:
    """Returns the chat with the bridge that `agent.renderer` names; with `auto` the first that fits
    the chat template, if any. Raises `ConfigurationError` for one that is missing, unknown or does
    not fit.
    """
    if name == NONE:
        return chat
    renderer_names = _known_names(name)
    if not isinstance(chat, TemplateChat):
        if name == AUTO:
            return chat
        raise ConfigurationError(f"agent.renderer = {name!r} needs a model with a chat template")
    for each in renderer_names if name == AUTO else (name,):
        try:
            bridge = _fitting(each, chat)
        except ValueError as error:
            if name != AUTO:
                raise ConfigurationError(
                    f"agent.renderer = {name!r} does not fit {chat.tokenizer.where}: {error}"
                ) from error
            log.debug("the renderer %s does not fit: %s", each, error)
            continue
        log.info("turns are bridged by the renderer %s", each)
        return TemplateChat(chat.tokenizer, chat.tool_format, bridge, chat.system)
    log.info("no renderer fits %s: its chat template joins turns", chat.tokenizer.where)
    return chat


def _known_names(name: str) -> list[str]:
    try:
        import renderers
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError as error:
        raise ConfigurationError(
            f"agent.renderer = {name!r} needs the library renderers, which cannot be imported "
            f"({error}): pip install 'rollstream[renderers]', or beside vLLM as "
            "docs/how-to/train-an-agent.md says"
        ) from error
    renderer_names = sorted({*MODEL_RENDERER_MAP.values()} - _UNUSABLE.keys())
    if name != AUTO and name not in renderer_names:
        reason = _UNUSABLE.get(name, f"renderers {renderers.__version__} has no such renderer")
        names = ", ".join([NONE, AUTO, *renderer_names])
        raise ConfigurationError(f"agent.renderer = {name!r}: {reason}; choose one of {names}")
    return renderer_names


def _fitting(name: str, chat: TemplateChat) -> RendererBridge:
    import renderers

    kind = type(renderers.config_from_name(name))
    # With or without thinking, whichever fits the chat.
    variants: list[dict[str, bool]] = [{}]
    if "enable_thinking" in kind.model_fields:
        variants.append({"enable_thinking": False})
    reasons: list[str] = []
    for variant in variants:
        try:
            # Reasoning of earlier turns stays, as the tokens of an episode do.
            config = kind(thinking_retention="all", **variant)
            renderer = cast("Renderer", renderers.create_renderer(chat.tokenizer.whole, config))
            if not (reason := misfit(renderer, chat)):
                return RendererBridge(renderer)
        except LIBRARY_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
        reasons.append(reason)
    raise ValueError(reasons[0])


def misfit(renderer: Renderer, chat: TemplateChat) -> str:
    """Returns why a renderer does not fit a chat template, by test chats; "" if it fits."""
    # A chat that the template refuses is left out.
    for messages in ([_QUESTION], [_SYSTEM, _QUESTION]):
        template_ids = _rendered(chat, messages, ())
        renderer_ids = renderer.render_ids(messages, add_generation_prompt=True)
        if template_ids is not None and renderer_ids != template_ids:
            return f"it renders {_roles(messages)} otherwise than the chat template"
    bridged = 0
    # The rendering of an earlier answer does not matter: its tokens are held.
    for answer, message, tools in ((_ANSWER, _QUESTION, ()), (_CALL, _RESULT, (_TOOL,))):
        prompt = _rendered(chat, [_QUESTION], tools)
        template_ids = _rendered(chat, [_QUESTION, answer, message], tools)
        if prompt is None or template_ids is None:
            continue
        for text in ("5", "</think>\n\n5"):  # a prompt that begins a thought needs its end
            answer_ids = chat.encode(text + chat.template.last_text)
            added = RendererBridge(renderer).added_tokens(prompt, answer_ids, [message], tools)
            if added is None:
                continue
            if template_ids[-len(added) :] != added:
                return f"it renders {_roles([message])} after an answer otherwise than the template"
            bridged += 1
            break
    return "" if bridged else "it bridges no test chat"


def _rendered(
    chat: TemplateChat, messages: Sequence[JsonObject], tools: Sequence[JsonObject]
) -> list[int] | None:
    try:
        return chat.encode(chat.render(messages, tools, is_asked=True))
    except ChatRefused:
        return None


def _roles(messages: Sequence[JsonObject]) -> str:
    return "a message of " + " and ".join(str(message["role"]) for message in messages)
