"""One thread reads the token streams. It queues an event's output and then counts its tokens: once
`settle` has seen a count, `take` returns these tokens.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import httpx2

from rollstream.errors import DecodeError, EngineRefused
from rollstream.producers.engines.vllm.local.protocol import StepOutput
from rollstream.producers.engines.vllm.remote.http import CONNECT_TIMEOUT_S, NO_REUSE, parse_output

GENERATE_ROUTE = "/inference/v1/generate"
EVENT_BYTES_MAX = 1 << 20  # a larger event breaks the stream
SETTLE_TIMEOUT_S = 60.0  # longest wait for tokens that the server has generated
_POLL_S = 0.001


@dataclass(slots=True, eq=False)
class TokenStream:
    """The stream of the request `key`, which the server knows as `name`. `seen` counts queued
    tokens.
    """

    key: str
    name: str
    seen: int = 0
    ended: bool = False
    task: "Future[None] | None" = None


@dataclass(slots=True)
class TokenStreams:
    """`headers` are sent with every request; `host` names the server in errors."""

    url: str
    headers: Mapping[str, str]
    host: str
    _news: "queue.SimpleQueue[tuple[TokenStream, StepOutput | str]]" = field(
        default_factory=queue.SimpleQueue[tuple[TokenStream, StepOutput | str]]
    )
    _broken: str | None = None
    _open: dict[str, TokenStream] = field(default_factory=dict[str, TokenStream])
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _client: "httpx2.AsyncClient | None" = None

    def __post_init__(self) -> None:
        # At INFO httpx2 logs every request; failures are raised as errors.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        threading.Thread(target=self._loop.run_forever, name="vllm-streams", daemon=True).start()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, key: str, name: str, body: bytes) -> None:
        stream = self._open[key] = TokenStream(key, name)
        stream.task = asyncio.run_coroutine_threadsafe(self._read(stream, body), self._loop)

    def names(self) -> dict[str, str]:
        return {key: stream.name for key, stream in self._open.items()}

    def take(self, wait_s: float) -> list[StepOutput]:
        """Returns the outputs that have arrived; waits up to `wait_s` for the first. Raises
        `EngineRefused` if a stream broke, after all outputs before.
        """
        outputs: list[StepOutput] = []
        while self._broken is None:
            try:
                wait = not outputs and wait_s > 0
                stream, news = self._news.get(wait, wait_s if wait else None)
            except queue.Empty:
                return outputs
            if self._open.get(stream.key) is not stream:
                continue  # closed meanwhile
            if isinstance(news, str):  # why the stream broke
                self._broken = news
                break
            if news.finish is not None:
                del self._open[stream.key]
            outputs.append(news)
        if not outputs:
            raise EngineRefused(f"vLLM server {self.host}: {self._broken}")
        return outputs

    def close(self, keys: Iterable[str]) -> None:
        """Close these streams, which aborts their requests; `take` returns no more output of
        theirs.
        """
        for key in keys:
            stream = self._open.pop(key, None)
            if stream is not None and stream.task is not None:
                stream.task.cancel()

    def settle(self, counts: Mapping[str, int]) -> None:
        """Wait until so many tokens of each open stream are queued, or it has ended. Raises
        `EngineRefused` after `SETTLE_TIMEOUT_S`.
        """
        end = time.monotonic() + SETTLE_TIMEOUT_S
        for key, count in counts.items():
            stream = self._open[key]
            while stream.seen < count and not stream.ended:
                if time.monotonic() > end:
                    raise EngineRefused(
                        f"vLLM server {self.host}: of {count} tokens of {key!r} that it generated "
                        f"{stream.seen} arrived within {SETTLE_TIMEOUT_S:g} s"
                    )
                time.sleep(_POLL_S)

    def close_all(self) -> None:
        self.close(list(self._open))
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
        self._loop.stop()

    async def _read(self, stream: TokenStream, body: bytes) -> None:
        finished, broken = False, ""
        try:
            async for data in self._events(body):
                output = parse_output(stream.key, data)
                if output is not None:
                    finished = output.finish is not None
                    self._news.put((stream, output))
                    # After the output is queued: see `settle`.
                    stream.seen += len(output.tokens)
            broken = "" if finished else f"the stream of {stream.key!r} ended before its request"
        except httpx2.HTTPError as error:
            broken = f"the server ended or cannot be reached: {error or type(error).__name__}"
        except DecodeError as error:
            broken = f"{stream.key!r}: {error}"
        finally:
            if broken:
                self._news.put((stream, broken))
            stream.ended = True

    async def _events(self, body: bytes) -> AsyncIterator[bytes]:
        headers = {"Content-Type": "application/json"}
        async with self._connected().stream(
            "POST", GENERATE_ROUTE, content=body, headers=headers
        ) as response:
            if response.is_error:
                text = (await response.aread())[:1000].decode(errors="replace")
                raise DecodeError(f"{GENERATE_ROUTE} answered {response.status_code}: {text}")
            rest = b""
            async for part in response.aiter_bytes():
                *events, rest = (rest + part).split(b"\n\n")
                if len(rest) > EVENT_BYTES_MAX:
                    raise DecodeError(f"an event above {EVENT_BYTES_MAX} bytes")
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if data != b"[DONE]" and data != event:
                        yield data

    def _connected(self) -> httpx2.AsyncClient:
        # It belongs to the thread's event loop.
        if self._client is None:
            self._client = httpx2.AsyncClient(
                base_url=self.url,
                headers=dict(self.headers),
                # A paused server sends nothing for any length of time.
                timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
                limits=NO_REUSE,
                trust_env=False,
            )
        return self._client
