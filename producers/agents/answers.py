"""Writes a turn's answer in the form of each route; the answer is durable in the log before any
byte of it leaves.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.producers.agents.chat_format import ChatRefused
from rollstream.producers.agents.requests import (
    BodyTooLarge,
    EndpointBusy,
    EpisodeMoved,
    LimitReached,
    RequestRefused,
    SessionKeyRefused,
    SessionSealed,
    TurnFailed,
    TurnRequest,
)
from rollstream.streams.foreign_text import reason_text

MESSAGE_MAX = 1000  # characters of an error


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """`content`, `reasoning` and `tool_calls` are parsed from the tokens, `pieces` are the tokens'
    texts; `finish` is stop, length or tool_calls; `created_s` is the episode's begin.
    """

    digest: str
    content: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]
    finish: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[str]
    created_s: float


def answer_json(request: TurnRequest, answer: TurnAnswer) -> dict[str, Any]:
    if request.route == "chat":
        return _envelope(request, answer, "chat.completion", [_chat_choice(request, answer)])
    if request.route == "completion":
        return _envelope(request, answer, "text_completion", [_text_choice(request, answer)])
    if request.route == "response":
        return _response(request, answer)
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "length" if answer.finish == "length" else "stop",
        "token_ids": list(answer.token_ids),
        "logprobs": _chat_logprobs(answer, ids=True) if request.with_logprobs else None,
    }
    return {"request_id": answer.digest, "choices": [choice], "prompt_logprobs": None}


def answer_events(request: TurnRequest, answer: TurnAnswer) -> Iterator[str]:
    if request.route == "response":
        yield from _response_events(request, answer)
        return
    if request.route == "chat":
        yield from map(_event, _chat_chunks(request, answer))
    else:
        yield _event(answer_json(request, answer))
    yield "data: [DONE]\n\n"


def _event(value: object) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


def _usage(answer: TurnAnswer) -> dict[str, int]:
    prompt_tokens, gained = len(answer.prompt_ids), len(answer.token_ids)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": gained,
        "total_tokens": prompt_tokens + gained,
    }


def _envelope(
    request: TurnRequest, answer: TurnAnswer, kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    prefix = "cmpl" if request.route == "completion" else "chatcmpl"
    body: dict[str, Any] = {
        "id": f"{prefix}-{answer.digest}",
        "object": kind,
        "created": int(answer.created_s),
        "model": request.model,
        "choices": choices,
        "usage": _usage(answer),
    }
    if request.with_ids:
        body["prompt_token_ids"] = list(answer.prompt_ids)
    return body


def assistant_message(
    content: str, reasoning: str, tool_calls: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return message


def _chat_choice(request: TurnRequest, answer: TurnAnswer) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {
            **assistant_message(answer.content, answer.reasoning, answer.tool_calls),
            "refusal": None,
        },
        "finish_reason": answer.finish,
        "logprobs": _chat_logprobs(answer) if request.with_logprobs else None,
    }
    if request.with_ids:
        choice["token_ids"] = list(answer.token_ids)
    return choice


def _chat_logprobs(answer: TurnAnswer, ids: bool = False) -> dict[str, Any]:
    rows = zip(answer.token_ids, answer.pieces, answer.logprobs, strict=True)
    return {
        "content": [
            {
                "token": f"token_id:{token}" if ids else piece,
                "logprob": logprob,
                "bytes": list(piece.encode(errors="replace")),
                "top_logprobs": [],
            }
            for token, piece, logprob in rows
        ]
    }


def _text_choice(request: TurnRequest, answer: TurnAnswer) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "text": answer.content,
        "finish_reason": "length" if answer.finish == "length" else "stop",
        "logprobs": None,
    }
    if request.with_logprobs:
        choice["logprobs"] = {
            "tokens": list(answer.pieces),
            "token_logprobs": list(answer.logprobs),
            "top_logprobs": None,
            "text_offset": [],
        }
    if request.with_ids:
        choice["token_ids"] = list(answer.token_ids)
    return choice


def _chat_chunks(request: TurnRequest, answer: TurnAnswer) -> Iterator[dict[str, Any]]:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if finish is not None and request.with_ids:
            choice["token_ids"] = list(answer.token_ids)
        body = _envelope(request, answer, "chat.completion.chunk", [choice])
        del body["usage"]
        return body

    yield chunk({"role": "assistant", "content": ""})
    if answer.reasoning:
        yield chunk({"reasoning_content": answer.reasoning})
    if answer.content:
        yield chunk({"content": answer.content})
    for index, call in enumerate(answer.tool_calls):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answer.finish)
    if request.with_usage:
        yield {**chunk({}), "choices": [], "usage": _usage(answer)}


def _response(request: TurnRequest, answer: TurnAnswer) -> dict[str, Any]:
    is_cut = answer.finish == "length"
    usage = _usage(answer)
    return {
        "id": f"resp_{answer.digest}",
        "object": "response",
        "created_at": int(answer.created_s),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": request.model,
        "output": _output_items(answer),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        **({"token_ids": list(answer.token_ids)} if request.with_ids else {}),
    }


def _output_items(answer: TurnAnswer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        items.append(
            {
                "id": f"rs_{answer.digest}",
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": answer.reasoning}],
                "status": "completed",
            }
        )
    if answer.content or not answer.tool_calls:
        part: dict[str, Any] = {"type": "output_text", "text": answer.content, "annotations": []}
        items.append(
            {
                "id": f"msg_{answer.digest}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in answer.tool_calls:
        function = call["function"]
        items.append(
            {
                "id": f"fc_{call['id']}",
                "type": "function_call",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
                "status": "completed",
            }
        )
    return items


def _response_events(request: TurnRequest, answer: TurnAnswer) -> Iterator[str]:
    response = _response(request, answer)
    begun: dict[str, Any] = {**response, "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
        opened: dict[str, Any] = {**item, "status": "in_progress", **empty}
        events.append({"type": "response.output_item.added", "output_index": index, "item": opened})
        write = {"message": _text_events, "reasoning": _thought_events}
        events += write.get(item["type"], _call_events)(item, place)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    ending = "incomplete" if answer.finish == "length" else "completed"
    events.append({"type": f"response.{ending}", "response": response})
    for number, event in enumerate(events):
        yield f"event: {event['type']}\n{_event({**event, 'sequence_number': number})}"


def _text_events(item: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    (part,) = item["content"]
    at = {**place, "content_index": 0}
    return [
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
    ]


def _thought_events(item: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    (part,) = item["content"]
    at = {**place, "content_index": 0}
    return [
        {"type": "response.reasoning_text.delta", **at, "delta": part["text"]},
        {"type": "response.reasoning_text.done", **at, "text": part["text"]},
    ]


def _call_events(item: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    call_fields = {"arguments": item["arguments"], "name": item["name"]}
    return [
        {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]},
        {"type": "response.function_call_arguments.done", **place, **call_fields},
    ]


_STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (SessionKeyRefused, 401, "invalid_api_key"),
    (SessionSealed, 409, "session_sealed"),
    (EpisodeMoved, 503, "moving"),
    (EndpointBusy, 429, "too_many_requests"),
    (LimitReached, 400, "limit_reached"),
    (BodyTooLarge, 413, "invalid_request"),
    (RequestRefused, 400, "invalid_request"),
    (ChatRefused, 400, "invalid_messages"),
    (TurnFailed, 422, "turn_failed"),
)


REFUSAL_CODES = ("error", *dict.fromkeys(code for _, _, code in _STATUSES))
"""The codes of errors, by which refused requests are counted."""


def refusal_code(error: Exception) -> str:
    return _status_of(error)[1]


def _status_of(error: Exception) -> tuple[int, str]:
    matching = ((number, code) for kind, number, code in _STATUSES if isinstance(error, kind))
    return next(matching, (500, "error"))


def error_event(error: Exception) -> str:
    return _event(error_body(error)[1])


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Returns the status of an error, and the body in OpenAI's form."""
    status, code = _status_of(error)
    message = reason_text(error, MESSAGE_MAX)
    # OpenAI's code for a full context, by which clients recognise it.
    if "context_length_exceeded" in message:
        code = "context_length_exceeded"
    return status, {"error": {"message": message, "type": "rollstream", "code": code}}
