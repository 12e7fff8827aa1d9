"""The wire format of a vLLM server: requests for tokens, the events of a stream, and the lines of
`/metrics` that are used. Pure.

Field names are those of vLLM's `/inference/v1/generate`; unknown fields are ignored.
"""

from collections.abc import Iterable

import msgspec

from rollstream.producers.engines.vllm.protocol import StepOutput, CoreLoad, CoreRequest
from rollstream.errors import DecodeError

REQUEST_PREFIX = "generate-tokens-"
"""vLLM's prefix of a request's name."""


class LogProb(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class LogProbs(msgspec.Struct, frozen=True):
    content: list[LogProb] | None = None


class VersionSpan(msgspec.Struct, frozen=True):
    version: str
    start: int


class StreamChoice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: LogProbs | None = None
    weight_versions: list[VersionSpan] | None = None


class StreamEvent(msgspec.Struct, frozen=True):
    choices: list[StreamChoice] = []
    error: msgspec.Raw | None = None


_EVENTS = msgspec.json.Decoder(StreamEvent)


def generate_body(order: CoreRequest, name: str) -> bytes:
    """The body of a request for a stream of tokens with their log-probabilities."""
    s = order.sampling
    sampling = {
        "temperature": s.temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "seed": None if s.temperature == 0 else order.seed,
        "max_tokens": order.room,
        "stop_token_ids": list(s.stop),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    return msgspec.json.encode(
        {
            "request_id": name,
            "token_ids": order.tokens,
            "sampling_params": sampling,
            "cache_salt": order.salt.replace("/", "."),  # vLLM accepts no slash here
            "stream": True,
        }
    )


def parse_output(key: str, data: bytes) -> StepOutput | None:
    """The output in an event; None for an event without one. Raises `DecodeError` for an error that
    the server reports, and for an event that cannot be decoded.
    """
    try:
        event = _EVENTS.decode(data)
    except msgspec.DecodeError as error:
        raise DecodeError(f"vLLM's stream cannot be decoded: {error}: {data[:200]!r}") from error
    if event.error is not None:
        raise DecodeError(f"vLLM ended the request: {bytes(event.error)[:500].decode()}")
    if not event.choices:
        return None
    (choice,) = event.choices
    tokens = choice.token_ids or []
    rows = (choice.logprobs.content if choice.logprobs else None) or []
    if [row.token_id for row in rows] != tokens:
        raise DecodeError(f"vLLM gave {len(rows)} log-probabilities for {len(tokens)} tokens")
    logprobs = [row.logprob for row in rows]
    stamped = tuple((span.version, span.start) for span in choice.weight_versions or ())
    return StepOutput(key, tokens, logprobs, choice.finish_reason, stamped)


def request_name(inside: str) -> str:
    """The name that this client gave to a request, from vLLM's internal name: that has a prefix
    and, unless vLLM is configured otherwise, a dash and eight more characters. Names given here
    contain no dash.
    """
    return inside.removeprefix(REQUEST_PREFIX).partition("-")[0]


def parse_load(lines: Iterable[str]) -> CoreLoad:
    """The load in a page of metrics."""
    found = {"running": 0.0, "waiting": 0.0, "kv": 0.0}
    names = {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:kv_cache_usage_perc": "kv",
    }
    for line in lines:
        name = names.get(line.partition("{")[0].partition(" ")[0])
        if name is not None:
            found[name] += float(line.rpartition(" ")[2])
    return CoreLoad(int(found["running"]), int(found["waiting"]), found["kv"])
