"""Seeded odd inputs from the side of agents: bodies of requests, tool definitions, states of
episodes and texts of a model. The same (seed, number) gives the same input.

Each is a well-formed one in which one to four places hold something else: another type, a number
beyond its bounds, half of a surrogate pair, deep nesting, a text that is cut or repeated.
"""

import json
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from rollstream.streams.records import Partial
from rollstream.streams.values import Turn

HALF = "\ud83d"
TEXTS = (
    "", " ", "hello", HALF, f"cut {HALF}", "\udc00\ud83d", "\ud83d\ude00", "\x00", "\x1b[2J",
    "\u202e", "a" * 5000, "</think>", "<|end|>", "<tool_call>", "{{ x }}", "{% raise %}", "NaN",
    "../..", "%s{0}",
)  # fmt: skip
NUMBERS = (
    -1, 0, 1, 0.5, -0.0, 1e300, -1e300, 5e-324, 2**31, 2**53, 2**63, 2**64, 2**70, 10**299, 10**400,
    float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"a": 1}, {HALF: HALF}, "x", 5)
ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/inference/v1/generate",
)  # fmt: skip
DEPTHS = (3, 60, 127, 200, 900)


def hostile_body(seed: int, number: int) -> tuple[str, bytes]:
    """Returns a route and the body of a request for a turn."""
    drawn = _drawn(seed, "body", number)
    route = drawn.choice(ROUTES)
    body: Any = _BODIES[route](drawn)
    for _ in range(drawn.randint(1, 4)):
        body = _changed(drawn, body)
    return route, _damaged(drawn, body)


def hostile_tools(seed: int, number: int) -> bytes:
    """Returns the body of a request for a chat whose tools are odd."""
    drawn = _drawn(seed, "tools", number)
    body = _chat(drawn)
    tools: Any = [_tool(drawn) for _ in range(drawn.randint(1, 3))]
    for _ in range(drawn.randint(1, 4)):
        tools = _changed(drawn, tools)
    return json.dumps({**body, "tools": tools}).encode()


def hostile_chat(seed: int, number: int) -> bytes:
    """Returns the body of a request for a chat whose messages are odd."""
    drawn = _drawn(seed, "chat", number)
    body = _chat(drawn)
    messages: Any = body["messages"]
    for _ in range(drawn.randint(1, 3)):
        messages = _changed(drawn, messages)
    return json.dumps({**body, "messages": messages}).encode()


def hostile_end(seed: int, number: int) -> bytes:
    """Returns the body of a request that sets a reward or ends a session."""
    drawn = _drawn(seed, "end", number)
    body: Any = {
        "reward": drawn.choice((0.5, 1.0, *NUMBERS)),
        "scores": {drawn.choice(TEXTS): drawn.choice(NUMBERS) for _ in range(drawn.randint(0, 3))},
    }
    if drawn.random() < 0.5:
        body["failed"] = drawn.choice((*TEXTS, *OTHERS))
    return json.dumps(_changed(drawn, body)).encode()


def hostile_state(seed: int, number: int) -> str:
    """Returns the state of an episode as a partial holds it: any text that UTF-8 can encode."""
    drawn = _drawn(seed, "state", number)
    state: Any = {"reward": 0.5, "scores": {"style": 1.0}, "ended": "", "abandoned": [0]}
    for name in drawn.sample(sorted(state), drawn.randint(0, 3)):
        del state[name]
    for _ in range(drawn.randint(0, 3)):
        state = _changed(drawn, state)
    return _damaged(drawn, state).decode(errors="replace")


def partial(name: str, environment: str, **changed: Any) -> Partial:
    """Returns a partial of an episode without a token, with this state."""
    fields: dict[str, Any] = {
        "trajectory": name, "group": int(name.partition(".")[0]), "attempt": 1, "rollout": "r",
        "rollout_term": 1, "previous": None, "start": 0, "tokens": np.empty(0, np.uint32),
        "sources": np.empty(0, np.uint8), "logprobs": np.empty(0, np.float32), "spans": (),
        "environment": environment,
    }  # fmt: skip
    return Partial(**(fields | changed))


def hostile_partial(seed: int, name: str, number: int, **changed: Any) -> Partial:
    """Returns a partial with an odd state, in one of three cases with an odd turn, too."""
    drawn = _drawn(seed, "partial", number)
    turns: tuple[Turn, ...] = ()
    if drawn.random() < 0.33:
        edges = [drawn.choice((0, 0, 1, 2, -1, 2**40, 2**70)) for _ in range(3)]
        finish, answer = drawn.choice(TEXTS[:3]), hostile_state(seed, number)
        start, generated, end = edges
        turns = (Turn("d", "h", start, generated, end, finish, 0.0, 0.0, answer=answer),)
    return partial(name, hostile_state(seed, number), turns=turns, **changed)


def hostile_text(seed: int, number: int) -> str:
    """Returns a text that a model might have written."""
    drawn = _drawn(seed, "text", number)
    kind = drawn.randrange(4)
    if kind == 0:
        return "".join(drawn.choice(_PIECES) for _ in range(drawn.randint(1, 60)))
    if kind == 1:
        return drawn.choice(_PIECES) * drawn.choice((2, 70, 400, 3000))
    call = json.dumps({"name": "add", "arguments": _value(drawn, 4)})
    text = drawn.choice(
        (f"<tool_call>{call}</tool_call>", call, f"{call};{call}", f"[TOOL_CALLS][{call}]",
         f"[TOOL_CALLS]add{call}", f"[add(x={_value(drawn, 3)!r})]", f"<|python_tag|>{call}")
    ) * drawn.choice((1, 1, 1, 3, 70))  # fmt: skip
    for _ in range(drawn.randint(0, 4)):
        at = drawn.randrange(len(text) + 1)
        text = text[:at] + drawn.choice(_PIECES) * drawn.choice((1, 1, 90)) + text[at + 1 :]
    return text


_PIECES = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "</think>",
    '{"name": "add"', ', "arguments": ', "{}", "}", "[", "]", "{", "(", ")", "add(", "x=", "1",
    ",", ";", "\\", '"', ".a", "-", "not ", "+1", "1e999", "9" * 50, HALF, "\\ud83d", "lambda:",
    "\n", "NaN", "**x", "b'", "[a" + ".a" * 400 + "(x=1)]", "if 1 else ", "<think>",
)  # fmt: skip


def _drawn(seed: int, what: str, number: int) -> random.Random:
    return random.Random(f"{seed} {what} {number}")


def _value(drawn: random.Random, depth: int) -> Any:
    kind = drawn.randrange(5 if depth else 3)
    if kind < 1:
        return drawn.choice(TEXTS)
    if kind < 2:
        return drawn.choice(NUMBERS)
    if kind < 3:
        return drawn.choice(OTHERS)
    if kind < 4:
        return [_value(drawn, depth - 1) for _ in range(drawn.randint(0, 3))]
    return {drawn.choice(TEXTS): _value(drawn, depth - 1) for _ in range(drawn.randint(0, 3))}


def _nested(drawn: random.Random) -> Any:
    inner: Any = drawn.choice(TEXTS)
    for _ in range(drawn.choice(DEPTHS)):
        inner = {"a": inner} if drawn.random() < 0.5 else [inner]
    return inner


def _changed(drawn: random.Random, value: Any) -> Any:
    """Returns the value with one place, at any depth, that holds something else."""
    if isinstance(value, dict) and value and drawn.random() < 0.9:
        table = cast("dict[str, Any]", value)
        name = drawn.choice(sorted(table))
        inner = table[name]
        kept = {each: item for each, item in table.items() if each != name}
        if drawn.random() < 0.1:
            return kept
        return kept | {name if drawn.random() < 0.95 else HALF: _changed(drawn, inner)}
    if isinstance(value, list) and value and drawn.random() < 0.9:
        items = cast("list[Any]", value)
        at = drawn.randrange(len(items))
        return [_changed(drawn, item) if at == n else item for n, item in enumerate(items)]
    return _nested(drawn) if drawn.random() < 0.1 else _value(drawn, 2)


def _damaged(drawn: random.Random, value: Any) -> bytes:
    """Returns the JSON of the value, in one of ten cases cut, or with bytes that belong nowhere."""
    data = json.dumps(value, ensure_ascii=drawn.random() < 0.5).encode(errors="surrogatepass")
    if drawn.random() < 0.9:
        return data
    at = drawn.randrange(len(data) + 1)
    return drawn.choice((data[:at], data[:at] + b"\xff" + data[at:], data * 2, b"[" * 50_000, b""))


def _messages(drawn: random.Random) -> list[Any]:
    said: list[Any] = [{"role": "user", "content": drawn.choice(TEXTS)}]
    if drawn.random() < 0.5:
        call = {"name": "add", "arguments": '{"a": 1}'}
        calls = [{"id": "c0", "type": "function", "function": call}]
        said.append({"role": "assistant", "content": "", "tool_calls": calls})
        said.append({"role": "tool", "tool_call_id": "c0", "content": drawn.choice(TEXTS)})
    if drawn.random() < 0.3:
        said.append({"role": "user", "content": [{"type": "text", "text": drawn.choice(TEXTS)}]})
    return said


def _tool(drawn: random.Random) -> Any:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    function = {"name": "add", "description": drawn.choice(TEXTS), "parameters": schema}
    return {"type": "function", "function": function}


def _chat(drawn: random.Random) -> Any:
    return {
        "model": "m", "messages": _messages(drawn), "max_tokens": 2, "temperature": 1.0,
        "tools": [_tool(drawn)], "stream": drawn.random() < 0.1, "logprobs": drawn.random() < 0.1,
    }  # fmt: skip


def _completion(drawn: random.Random) -> Any:
    prompt = drawn.choice((drawn.choice(TEXTS), [1, 2, 3], [drawn.choice(TEXTS)]))
    return {"model": "m", "prompt": prompt, "max_tokens": 2, "n": 1}


def _response(drawn: random.Random) -> Any:
    items: list[Any] = [
        {"type": "message", "role": "user", "content": drawn.choice(TEXTS)},
        {"type": "function_call", "call_id": "c0", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c0", "output": drawn.choice(TEXTS)},
    ]
    tool = {"type": "function", **_tool(drawn)["function"]}
    return {"model": "m", "input": items, "tools": [tool], "max_output_tokens": 2}


def _tokens(drawn: random.Random) -> Any:
    parameters = {"max_tokens": 2, "temperature": 1.0, "logprobs": 1}
    return {"token_ids": [1, 2, 3], "sampling_params": parameters}


_BODIES: dict[str, Callable[[random.Random], Any]] = dict(
    zip(ROUTES, (_chat, _completion, _response, _tokens), strict=True)
)
