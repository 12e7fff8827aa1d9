"""The streams of tokens of a vLLM server, read by one thread: each request is an HTTP response that
ends with its request.

Every event is counted before it is handed out, in the order of its stream. Closing a stream aborts
its request; what was not read of it by then never happened. A stream that breaks is told by the
next `take`.
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

from producers.engines.vllm_engine.exchange import Gained
from producers.engines.vllm_engine.remote.routes import CONNECT_S, NO_REUSE
from producers.engines.vllm_engine.remote.wire import gained_of
from streams.errors import DecodeError, EngineRefused

ROUTE = "/inference/v1/generate"
EVENT_BYTES_MAX = 1 << 20
SETTLE_S = 60.0
_LOOK_S = 0.001


@dataclass(slots=True, eq=False)
class Stream:
    """One request; `seen` tokens of it were read."""

    key: str
    name: str
    seen: int = 0
    ended: bool = False
    task: "Future[None] | None" = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A stream ended without its request."""

    why: str


@dataclass(slots=True)
class Streams:
    """Those of one server, by the key of their request."""

    url: str
    headers: Mapping[str, str]
    host: str
    _news: "queue.SimpleQueue[tuple[Stream, Gained | Broken]]" = field(
        default_factory=queue.SimpleQueue[tuple[Stream, Gained | Broken]]
    )
    _broken: str | None = None
    _open: dict[str, Stream] = field(default_factory=dict[str, Stream])
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _client: "httpx2.AsyncClient | None" = None

    def __post_init__(self) -> None:
        # Its INFO says every request; what matters is told by errors.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        threading.Thread(target=self._loop.run_forever, name="vllm-streams", daemon=True).start()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, key: str, name: str, body: bytes) -> None:
        stream = self._open[key] = Stream(key, name)
        stream.task = asyncio.run_coroutine_threadsafe(self._read(stream, body), self._loop)

    def names(self) -> dict[str, str]:
        """Of the open streams, by key."""
        return {key: stream.name for key, stream in self._open.items()}

    def take(self, wait_s: float) -> list[Gained]:
        """What came, at least one thing if one comes in time. `EngineRefused` where a stream broke
        and nothing else is left to hand out.
        """
        gains: list[Gained] = []
        while self._broken is None:
            try:
                wait = not gains and wait_s > 0
                stream, news = self._news.get(wait, wait_s if wait else None)
            except queue.Empty:
                return gains
            if self._open.get(stream.key) is not stream:
                continue  # closed meanwhile
            if isinstance(news, Broken):
                self._broken = news.why
                break
            if news.finish is not None:
                del self._open[stream.key]
            gains.append(news)
        if not gains:
            raise EngineRefused(f"vLLM server {self.host}: {self._broken}")
        return gains

    def close(self, keys: Iterable[str]) -> None:
        """Nothing more of these is handed out."""
        for key in keys:
            stream = self._open.pop(key, None)
            if stream is not None and stream.task is not None:
                stream.task.cancel()

    def settle(self, wanted: Mapping[str, int]) -> None:
        """Return once so many tokens of these were read, or all that there are; `EngineRefused`
        where they do not come.
        """
        end = time.monotonic() + SETTLE_S
        for key, count in wanted.items():
            stream = self._open[key]
            while stream.seen < count and not stream.ended:
                if time.monotonic() > end:
                    raise EngineRefused(
                        f"vLLM server {self.host}: of {count} tokens of {key!r} that it generated "
                        f"{stream.seen} arrived within {SETTLE_S:g} s"
                    )
                time.sleep(_LOOK_S)

    def shut(self) -> None:
        """Close all of them and end the thread."""
        self.close(list(self._open))
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
        self._loop.stop()

    async def _read(self, stream: Stream, body: bytes) -> None:
        """Hand out what the stream says, to its end."""
        finished, broken = False, ""
        try:
            async for data in self._events(body):
                gained = gained_of(stream.key, data)
                if gained is not None:
                    finished = gained.finish is not None
                    self._news.put((stream, gained))
                    stream.seen += len(gained.tokens)
            broken = "" if finished else f"the stream of {stream.key!r} ended before its request"
        except httpx2.HTTPError as error:
            broken = f"it ended or cannot be reached: {error or type(error).__name__}"
        except DecodeError as error:
            broken = f"{stream.key!r}: {error}"
        finally:
            if broken:
                self._news.put((stream, Broken(broken)))
            stream.ended = True

    async def _events(self, body: bytes) -> AsyncIterator[bytes]:
        """The data of each event."""
        headers = {"Content-Type": "application/json"}
        async with self._connected().stream(
            "POST", ROUTE, content=body, headers=headers
        ) as response:
            if response.is_error:
                said = (await response.aread())[:1000].decode(errors="replace")
                raise DecodeError(f"{ROUTE} answered {response.status_code}: {said}")
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
        """Of the thread's loop."""
        if self._client is None:
            self._client = httpx2.AsyncClient(
                base_url=self.url,
                headers=dict(self.headers),
                # A paused server says nothing for as long as it takes.
                timeout=httpx2.Timeout(None, connect=CONNECT_S),
                limits=NO_REUSE,
                trust_env=False,
            )
        return self._client
