"""The HTTP interface to a vLLM server. A failed call raises `EngineRefused`, which names the server
but never contains its API key.
"""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec

from rollstream.errors import DecodeError, EngineRefused
from rollstream.producers.engines.vllm.local.protocol import CoreLoad, CoreRequest, StepOutput

REQUEST_PREFIX = "generate-tokens-"
"""vLLM puts this before the client's name of a request (`request_name`)."""


class LogProb(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class LogProbs(msgspec.Struct, frozen=True):
    content: list[LogProb] | None = None


class VersionSpan(msgspec.Struct, frozen=True):
    version: str
    start: int


class StreamChoice(msgspec.Struct, frozen=True):
    """The content of one event; only the last of a request has `finish_reason` and
    `weight_versions`.
    """

    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: LogProbs | None = None
    weight_versions: list[VersionSpan] | None = None


class StreamEvent(msgspec.Struct, frozen=True):
    """The content, in a list of one, or an error."""

    choices: list[StreamChoice] = []
    error: msgspec.Raw | None = None


_EVENTS = msgspec.json.Decoder(StreamEvent)


def generate_body(request: CoreRequest, name: str) -> bytes:
    """Returns the body of a request for a stream of tokens with their log-probabilities; `name` is
    this client's name of it.
    """
    s = request.sampling
    sampling = {
        "temperature": s.temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "seed": None if s.temperature == 0 else request.seed,
        "max_tokens": request.room,
        "stop_token_ids": list(s.stop),
        "ignore_eos": True,
        "logprobs": 0,  # that of the sampled token alone
        "detokenize": False,
    }
    return msgspec.json.encode(
        {
            "request_id": name,
            "token_ids": request.tokens,
            "sampling_params": sampling,
            "cache_salt": request.salt.replace("/", "."),  # vLLM accepts no slash here
            "stream": True,
        }
    )


def parse_output(key: str, data: bytes) -> StepOutput | None:
    """Returns None for an event without output. Raises `DecodeError` for an error of the server or
    an unreadable event.
    """
    try:
        event = _EVENTS.decode(data)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
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
    """Returns the name that this client gave to the request that vLLM names `inside`."""
    # `REQUEST_PREFIX`, the client's name, which contains no dash, and, unless vLLM is configured
    # otherwise, a dash and eight more characters.
    return inside.removeprefix(REQUEST_PREFIX).partition("-")[0]


def parse_load(lines: Iterable[str]) -> CoreLoad:
    sums = {"running": 0.0, "waiting": 0.0, "kv": 0.0}
    names = {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:kv_cache_usage_perc": "kv",
    }
    for line in lines:
        name = names.get(line.partition("{")[0].partition(" ")[0])
        if name is not None:
            # Lines with other labels are added up.
            sums[name] += float(line.rpartition(" ")[2])
    return CoreLoad(int(sums["running"]), int(sums["waiting"]), sums["kv"])


ANSWER_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0  # to load a chunk of a large model into all workers of a server
CONNECT_TIMEOUT_S = 10.0
NO_REUSE = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
"""A connection per request: the server closes it after an error or idle seconds, perhaps during the
next one.
"""


class ServerRoutes:
    """Thread-safe. Every method except `is_alive` raises `EngineRefused` if the server does not
    answer in time or cannot be reached.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url.rstrip("/")
        self.host = urlsplit(url).netloc
        self._client = httpx2.Client(
            base_url=self.url,
            headers=dict(headers),
            timeout=httpx2.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=NO_REUSE,
            trust_env=False,  # no proxy from the environment: it would end long streams
        )

    def get(self, path: str) -> httpx2.Response:
        return self._send("GET", path)

    def probe(self, path: str) -> int:
        """Returns the status of an empty POST: whether the route exists and the API key is
        accepted.
        """
        return self._send("POST", path, json={}).status_code

    def post(
        self,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        within_s: float = ANSWER_TIMEOUT_S,
    ) -> Any:
        """Returns the response's JSON, None if it is empty. Raises `EngineRefused` also for an
        error status.
        """
        response = self._send("POST", path, json=body, params=query, timeout=within_s)
        if response.is_error:
            text = response.text[:1000]
            raise EngineRefused(
                f"vLLM server {self.host}: {path} answered {response.status_code}: {text}"
            )
        return response.json() if response.content else None

    def call(self, method: str, *arguments: Any, within_s: float = ANSWER_TIMEOUT_S) -> list[Any]:
        """Returns the results of this method (`worker.py`) in each of the server's workers. Raises
        `EngineRefused` also for a worker's refusal.
        """
        body = {"method": method, "args": list(arguments)}
        answered = self.post("/collective_rpc", body, within_s=within_s)
        results: list[Any] = answered["results"] if answered else []
        for result in results:
            if isinstance(result, dict) and "refused" in result:
                raise EngineRefused(f"vLLM server {self.host}: {result['refused']}")
        return results

    def is_alive(self) -> bool:
        try:
            return self._client.get("/health", timeout=CONNECT_TIMEOUT_S).is_success
        except httpx2.HTTPError:
            return False

    def close(self) -> None:
        self._client.close()

    def _send(self, verb: str, path: str, **more: Any) -> httpx2.Response:
        try:
            return self._client.request(verb, path, **more)
        except httpx2.HTTPError as error:
            raise EngineRefused(
                f"vLLM server {self.host}: {path} was not answered, "
                f"the server ended or cannot be reached: {error or type(error).__name__}"
            ) from error
