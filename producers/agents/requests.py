"""Reads requests. The run decides how tokens are sampled: a client's other wish is overridden and
its name recorded; one that would change the answer (several choices, an earlier response by id)
raises `RequestRefused`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from rollstream.errors import RollstreamError
from rollstream.import_path import nearest
from rollstream.producers.agents.chat_format import JsonObject, text_of
from rollstream.producers.agents.conversation import digest_of
from rollstream.streams.admissible import LABEL_MAX, SCORES_MAX, is_bounded_number
from rollstream.streams.foreign_text import reason_text
from rollstream.streams.values import Sampling

Route = Literal["chat", "completion", "response", "tokens"]


class RequestRefused(RollstreamError, ValueError):
    """Raised for a request that cannot be served; the message states why."""


class BodyTooLarge(RequestRefused):
    """Raised for a body above `agent.body_bytes_max`."""


class SessionSealed(RollstreamError, PermissionError):
    """Raised for a request of an episode that has ended, or whose attempt was replaced."""


class SessionKeyRefused(RollstreamError, PermissionError):
    """Raised for a request without an authentic key."""


class EpisodeMoved(RollstreamError, ConnectionError):
    """The episode continues on another rollout, where the same request is answered."""


class EndpointBusy(RollstreamError, BlockingIOError):
    """Raised when too many requests wait."""


class LimitReached(RollstreamError, ValueError):
    """Raised for a turn that a limit of the run does not allow."""


class TurnFailed(RollstreamError, ValueError):
    """No answer can be made from the model's text, nor would a repeated request draw another."""


SHOWN_MAX = 80  # characters of a client's value in a message


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One request for a turn: `messages` with `tools`, or a `prompt` (text or tokens). `tokens_max`
    is the client's bound (None: the run's).
    """

    route: Route
    digest: str
    model: str
    messages: tuple[JsonObject, ...] = ()
    tools: tuple[JsonObject, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tokens_max: int | None = None
    overridden: tuple[str, ...] = ()
    is_streamed: bool = False
    with_usage: bool = False
    with_ids: bool = False
    with_logprobs: bool = False


def read_request(
    route: Route, body: JsonObject, run: Sampling, idempotency_key: str = ""
) -> TurnRequest:
    """Returns the request of this route's body; `run` is the run's sampling. Raises
    `RequestRefused`.
    """
    readers = {"chat": _chat, "completion": _completion, "response": _response, "tokens": _tokens}
    parameters = _object(body.get("sampling_params")) if route == "tokens" else body
    _refuse_several(body, parameters)
    usage = _object(body.get("stream_options")).get("include_usage")
    return TurnRequest(
        route=route,
        digest=digest_of({**body, "route": route}, idempotency_key),
        model=str(body.get("model") or ""),
        overridden=_overridden(parameters, run),
        is_streamed=bool(body.get("stream")),
        with_usage=bool(usage),
        with_ids=bool(body.get("return_token_ids")) or route == "tokens",
        **readers[route](body, parameters),
    )


def _refuse_several(body: JsonObject, parameters: JsonObject) -> None:
    for name in ("n", "best_of"):
        if parameters.get(name) not in (None, 1):
            shown = _shown(parameters[name])
            raise RequestRefused(f"{name} = {shown}: one answer is sampled a request")
    if body.get("previous_response_id"):
        raise RequestRefused("previous_response_id: send the whole history as `input`")
    if body.get("echo"):
        raise RequestRefused("echo: the prompt is not returned")
    for name, remedy in _REFUSED.items():
        if body.get(name):
            raise RequestRefused(f"{name}: {remedy}")


_SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "repetition_penalty": 1.0}  # fmt: skip
"""Parameters of sampling, with the values that change nothing."""
_REFUSED = {
    "functions": "send them as `tools`",
    "function_call": "send it as `tool_choice`",
    "suffix": "a text is continued at its end alone",
    "continue_final_message": "an answer begins behind the last message; use /v1/completions",
}
"""Fields that would change the prompt, each with the remedy."""
# fmt: off
_KNOWN = frozenset([
    "model", "messages", "prompt", "input", "instructions", "token_ids", "sampling_params", "tools",
    "tool_choice", "stream", "stream_options", "return_token_ids", "logprobs",
    "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "user", "metadata",
    "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id",
    "priority", "add_generation_prompt",
])
# fmt: on
"""Fields that are served, or concern no answer."""
_DEFAULTS = {
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
    "modalities": ["text"],
    "truncation": "disabled",
}
"""Parameters that no answer follows, with their neutral values."""
NAMED_MAX = 16  # overridden parameters that are recorded with a turn


def _overridden(parameters: JsonObject, run: Sampling) -> tuple[str, ...]:
    present = {**_SAMPLED, "temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
    names = [
        name
        for name, value in present.items()
        if parameters.get(name) is not None
        and parameters[name] not in (value, -1 if name == "top_k" else value)
    ]
    # Parameters that no answer follows are named, too.
    names += [
        name
        for name, value in parameters.items()
        if name not in _KNOWN and name not in _SAMPLED and len(name) <= LABEL_MAX
        if (value not in (None, _DEFAULTS[name]) if name in _DEFAULTS else value)
    ]
    if isinstance(parameters.get("logprobs"), int) and parameters["logprobs"] > 1:
        names.append("logprobs")  # those of the sampled tokens alone are known
    if parameters.get("tool_choice") not in (None, "auto", "none"):
        names.append("tool_choice")
    return tuple(names[:NAMED_MAX])


def _chat(body: JsonObject, parameters: JsonObject) -> dict[str, Any]:
    messages = _objects(body.get("messages"), "messages")
    if not messages:
        raise RequestRefused("messages is empty")
    tools = () if body.get("tool_choice") == "none" else _objects(body.get("tools"), "tools")
    return {
        "messages": _checked_messages(messages, "messages"),
        "tools": _checked_tools(tools),
        "tokens_max": _count(parameters, "max_completion_tokens", "max_tokens"),
        "with_logprobs": bool(body.get("logprobs")),
    }


def _completion(body: JsonObject, parameters: JsonObject) -> dict[str, Any]:
    raw_prompt: object = body.get("prompt")
    items = cast("list[object]", raw_prompt) if isinstance(raw_prompt, list) else []
    if len(items) == 1 and not isinstance(items[0], int):
        raw_prompt = items[0]
    prompt = (
        raw_prompt
        if isinstance(raw_prompt, str)
        else _token_ids(cast("object", raw_prompt), "prompt")
    )
    return {
        "prompt": prompt,
        "tokens_max": _count(parameters, "max_tokens"),
        "with_logprobs": body.get("logprobs") is not None,
    }


def _tokens(body: JsonObject, parameters: JsonObject) -> dict[str, Any]:
    return {
        "prompt": _token_ids(body.get("token_ids"), "token_ids"),
        "tokens_max": _count(parameters, "max_tokens"),
        "with_logprobs": parameters.get("logprobs") is not None,
    }


def _response(body: JsonObject, parameters: JsonObject) -> dict[str, Any]:
    raw_input: Any = body.get("input")
    items: Sequence[JsonObject] = (
        [{"role": "user", "content": raw_input}]
        if isinstance(raw_input, str)
        else _objects(raw_input, "input")
    )
    messages: list[JsonObject] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": str(body["instructions"])})
    for item in items:
        _add_item(messages, item)
    if not messages:
        raise RequestRefused("input is empty")
    tools = [_nested_tool(tool) for tool in _objects(body.get("tools"), "tools")]
    return {
        "messages": _checked_messages(messages, "input"),
        "tools": _checked_tools(tools),
        "tokens_max": _count(parameters, "max_output_tokens"),
    }


def _add_item(messages: list[JsonObject], item: JsonObject) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        # Calls of one turn are items of their own: they join the assistant's message before them,
        # as an answer joins its thought.
        is_answer = role == "assistant" and _is_thought(messages)
        thought: JsonObject = messages.pop() if is_answer else {}
        messages.append({**thought, "role": role, "content": text_of(item.get("content"))})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
        before = messages.pop() if last is not None else {"role": "assistant", "content": ""}
        messages.append({**before, "tool_calls": [*(before.get("tool_calls") or ()), call]})
    elif kind == "function_call_output":
        content = text_of(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "reasoning":
        if text := text_of(item.get("content")):
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    else:
        raise RequestRefused(f"an input item of type {_shown(kind)} is not served")


def _is_thought(messages: Sequence[JsonObject]) -> bool:
    last: JsonObject = messages[-1] if messages else {}
    return bool(last.get("reasoning_content")) and not (
        last.get("content") or last.get("tool_calls")
    )


def _nested_tool(tool: JsonObject) -> JsonObject:
    if tool.get("type") != "function":
        kind = _shown(tool.get("type"))
        raise RequestRefused(f"a tool of type {kind} is not served: run it yourself")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _checked_messages(messages: Sequence[JsonObject], name: str) -> tuple[JsonObject, ...]:
    # Later readers, a chat template too, meet no other types.
    return tuple(_checked_message(each, f"{name}[{at}]") for at, each in enumerate(messages))


def _checked_message(message: JsonObject, where: str) -> JsonObject:
    if not isinstance(message.get("role"), str):
        raise RequestRefused(f"{where}.role is not text")
    for name in ("tool_call_id", "name", "reasoning_content"):
        _check_text(message.get(name), f"{where}.{name}")
    text_of(message.get("content"))
    calls = _objects(message.get("tool_calls"), f"{where}.tool_calls")
    for at, call in enumerate(calls):
        _check_call(call, f"{where}.tool_calls[{at}]")
    return message


def _check_call(call: JsonObject, where: str) -> None:
    _check_text(call.get("id"), f"{where}.id")
    function = _named_function(call, where)
    arguments: object = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        raise RequestRefused(f"{where}.function.arguments is neither text nor an object")


def _checked_tools(tools: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
    for at, tool in enumerate(tools):
        function = _named_function(tool, f"tools[{at}]")
        _check_text(function.get("description"), f"tools[{at}].function.description")
        schema: object = function.get("parameters")
        if schema is not None and not isinstance(schema, dict):
            raise RequestRefused(f"tools[{at}].function.parameters is not an object")
    return tuple(tools)


def _named_function(holder: JsonObject, where: str) -> JsonObject:
    function: object = holder.get("function")
    name = cast("JsonObject", function).get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RequestRefused(f"{where}.function is not an object with a name")
    return cast("JsonObject", function)


def _check_text(value: object, where: str) -> None:
    if value is not None and not isinstance(value, str):
        raise RequestRefused(f"{where} is not text")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def _objects(value: object, name: str) -> tuple[JsonObject, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(
        isinstance(item, Mapping) for item in cast("list[object]", value)
    ):
        raise RequestRefused(f"{name} is not a list of objects")
    return tuple(cast("list[JsonObject]", value))


def _object(value: object) -> JsonObject:
    return cast("JsonObject", value) if isinstance(value, Mapping) else {}


def _token_ids(value: object, name: str) -> tuple[int, ...]:
    what = "a list of token ids" if name == "token_ids" else "text or a list of token ids"
    if value is None:
        raise RequestRefused(f"{name} is missing: send {what}")
    if not isinstance(value, list) or not value:
        raise RequestRefused(f"{name} = {_shown(cast(object, value))} is not {what}")
    numbers = cast("list[object]", value)
    for at, number in enumerate(numbers):
        if type(number) is not int or not 0 <= number < 1 << 32:
            raise RequestRefused(f"{name}[{at}] = {_shown(number)} is no token id")
    return tuple(cast("list[int]", numbers))


def _count(parameters: JsonObject, *names: str) -> int | None:
    for name in names:
        value = parameters.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise RequestRefused(f"{name} = {_shown(value)} is not a whole number above 0")
        return value
    return None


def refuse_unknown(body: JsonObject, *field_names: str) -> None:
    """Raises `RequestRefused` for a field that a route of sessions does not have."""
    # A misspelt field would be an end without its reward or its failure, and trained.
    for name in body:
        if name not in field_names:
            raise RequestRefused(
                f"unknown field {_shown(name)}{nearest(name, field_names)}; known are "
                f"{', '.join(field_names)}"
            )


def reward_in(body: JsonObject) -> float | None:
    """Returns None without a reward; `true` and `false` are 1 and 0. Raises `RequestRefused`."""
    reward: object = body.get("reward")
    return None if reward is None else _bounded(reward, "reward")


def scores_in(body: JsonObject) -> dict[str, float]:
    """Raises `RequestRefused` for scores that no trajectory may have."""
    scores: object = body.get("scores")
    if scores is None:
        return {}
    if not isinstance(scores, dict):
        raise RequestRefused("scores is not an object of numbers")
    scores_by_name = cast("dict[str, object]", scores)
    for name in scores_by_name:
        if not name.strip() or not name.isprintable():
            raise RequestRefused(f"scores has the name {_shown(name)}; give one of visible signs")
    if len(scores_by_name) > SCORES_MAX or any(len(name) > LABEL_MAX for name in scores_by_name):
        raise RequestRefused(
            f"scores has more than {SCORES_MAX} names, or one of more than {LABEL_MAX} characters"
        )
    return {name: _bounded(value, f"scores[{name!r}]") for name, value in scores_by_name.items()}


def _bounded(value: object, where: str) -> float:
    if not isinstance(value, int | float):
        raise RequestRefused(f"{where} = {_shown(value)} is not a number")
    if not is_bounded_number(value):  # before it becomes a float, which has no room for some
        raise RequestRefused(f"{where} = {_shown(value)} is not finite or too large")
    return float(value)


def failure_in(body: JsonObject) -> str:
    """Returns "" without a failure. Raises `RequestRefused` if it is no text, or has a reward
    beside it.
    """
    failure: object = body.get("failed")
    if failure is None:
        return ""
    if not isinstance(failure, str):
        raise RequestRefused(f"failed = {_shown(failure)} is not a reason in words")
    if body.get("reward") is not None:
        raise RequestRefused("reward and failed: an episode that failed has no reward; send one")
    return reason_text(f"failed: {failure.strip() or 'no reason was sent'}")
