"""Reads the bodies of the endpoint's routes into one form (`TurnRequest`): OpenAI's chat
completions, completions and responses, and vLLM's token route. Pure. Also names why a request is
refused.

The run decides how tokens are sampled, since it trains them. What a client asks otherwise is
overridden, and its name is recorded with the turn. What cannot be left out without changing what
the client gets (several choices, an earlier response by its id) raises `RequestRefused`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from rollstream.errors import RollstreamError
from rollstream.producers.agents.chat_format import JsonObject, text_of
from rollstream.producers.agents.conversation import digest_of
from rollstream.streams.admissible import is_bounded_number
from rollstream.streams.values import Sampling

Route = Literal["chat", "completion", "response", "tokens"]


class RequestRefused(RollstreamError, ValueError):
    """Raised for a request that cannot be served; the message states why."""


class SessionSealed(RollstreamError, PermissionError):
    """Raised for a request of an episode that has ended, or whose attempt was replaced."""


class SessionKeyRefused(RollstreamError, PermissionError):
    """Raised for a request without an authentic key."""


class EpisodeMoved(RollstreamError, ConnectionError):
    """Raised for a request that was not answered because the episode continues on another rollout;
    the same request is answered there.
    """


class EndpointBusy(RollstreamError, BlockingIOError):
    """Raised when too many requests wait."""


class LimitReached(RollstreamError, ValueError):
    """Raised for a turn that a limit of the run does not allow."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Holds one request for a turn: `messages` with `tools`, or a `prompt` (text or tokens).
    `tokens_max` is the most tokens that the client wants; None: what the run allows. `with_ids` and
    `with_logprobs` state that the answer shall have token ids and log-probabilities.
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
    """Return the request of this route's body; `run` is the sampling of the run. Raises
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
            raise RequestRefused(f"{name} = {parameters[name]}: one answer is sampled a request")
    if body.get("previous_response_id"):
        raise RequestRefused("previous_response_id: send the whole history as `input`")
    if body.get("echo"):
        raise RequestRefused("echo: the prompt is not returned")


_SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "repetition_penalty": 1.0}  # fmt: skip
"""Parameters of sampling, with the values that change nothing."""
_CONSTRAINTS = (
    "stop",
    "logit_bias",
    "response_format",
    "guided_json",
    "guided_regex",
    "logits_bias",
)


def _overridden(parameters: JsonObject, run: Sampling) -> tuple[str, ...]:
    """Return the names of the parameters that the client asked otherwise than the run samples."""
    present = {**_SAMPLED, "temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
    found = [
        name
        for name, value in present.items()
        if parameters.get(name) is not None
        and parameters[name] not in (value, -1 if name == "top_k" else value)
    ]
    found += [name for name in _CONSTRAINTS if parameters.get(name)]
    if parameters.get("tool_choice") not in (None, "auto", "none"):
        found.append("tool_choice")
    return tuple(found)


def _chat(body: JsonObject, parameters: JsonObject) -> dict[str, Any]:
    messages = _objects(body.get("messages"), "messages")
    if not messages:
        raise RequestRefused("messages is empty")
    tools = () if body.get("tool_choice") == "none" else _objects(body.get("tools"), "tools")
    return {
        "messages": messages,
        "tools": tools,
        "tokens_max": _count(parameters, "max_completion_tokens", "max_tokens"),
        "with_logprobs": bool(body.get("logprobs")),
    }


def _completion(body: JsonObject, parameters: JsonObject) -> dict[str, Any]:
    given: object = body.get("prompt")
    items = cast("list[object]", given) if isinstance(given, list) else []
    if len(items) == 1 and not isinstance(items[0], int):
        given = items[0]
    prompt = given if isinstance(given, str) else _token_ids(cast("object", given), "prompt")
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
    given: Any = body.get("input")
    items: Sequence[JsonObject] = (
        [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given, "input")
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
        "messages": tuple(messages),
        "tools": tuple(tools),
        "tokens_max": _count(parameters, "max_output_tokens"),
    }


def _add_item(messages: list[JsonObject], item: JsonObject) -> None:
    """Append an item of a response's input as a chat message. Calls of one turn are items of their
    own; they join the message of the assistant before them.
    """
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": text_of(item.get("content"))})
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
    elif kind != "reasoning":
        raise RequestRefused(f"an input item of type {kind!r} is not served")


def _nested_tool(tool: JsonObject) -> JsonObject:
    """Return a tool of the route `responses` in the form of chat completions."""
    if tool.get("type") != "function":
        raise RequestRefused(f"a tool of type {tool.get('type')!r} is not served: run it yourself")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


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
    numbers = cast("list[object]", value) if isinstance(value, list) else []
    if not numbers or not all(type(number) is int and 0 <= number < 1 << 32 for number in numbers):
        raise RequestRefused(f"{name} is neither text nor a list of token ids")
    return tuple(cast("list[int]", numbers))


def _count(parameters: JsonObject, *names: str) -> int | None:
    for name in names:
        value = parameters.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise RequestRefused(f"{name} = {value!r} is not a whole number above 0")
        return value
    return None


def reward_in(body: JsonObject) -> float | None:
    """Return the reward in the body of a route of sessions, None without one; checks its `scores`,
    too. Raises `RequestRefused`.
    """
    reward: object = body.get("reward")
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise RequestRefused(f"reward = {reward!r} is not a number")
    if not is_bounded_number(float(reward)):
        raise RequestRefused(f"reward = {reward!r} is not finite or too large")
    scores: object = body.get("scores") or {}
    if not isinstance(scores, dict) or not all(
        isinstance(value, int | float)
        for value in scores.values()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    ):
        raise RequestRefused("scores is not an object of numbers")
    return float(reward)
