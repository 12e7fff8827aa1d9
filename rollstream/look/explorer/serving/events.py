"""Sends the explorer's events to browsers (`EventHub`): one stream of server-sent events per page.
A slow page misses older events, and then reads the present state anyway.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

CLIENTS_MAX = 8
QUEUE_MAX = 64  # events that wait for one page
# Without an event a comment shows that the stream lives.
COMMENT_S = 15.0
RETRY_MS = 2000


class EventHub:
    """Passes events from any thread to all streams. `bind` is called in the server's loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: set[asyncio.Queue[bytes]] = set()
        self._is_closed = False

    @property
    def clients(self) -> int:
        return len(self._queues)

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def publish(self, event: str, data: Mapping[str, Any]) -> None:
        """Pass an event to all streams; without a page it is dropped."""
        loop = self._loop
        if loop is not None and self._queues and not self._is_closed:
            text = encode_event(event, data)
            loop.call_soon_threadsafe(self._put, text)

    def close(self) -> None:
        self._is_closed = True

    async def stream(self, first: list[bytes], watch: Callable[[], None]) -> AsyncIterator[bytes]:
        """Yields the events of one page, after those in `first`. `watch` is called every second
        while the page is connected.
        """
        queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUE_MAX)
        self._queues.add(queue)
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            for event in first:
                yield event
            waited = 0.0
            while not self._is_closed:
                watch()
                try:
                    yield await asyncio.wait_for(queue.get(), 1.0)
                    waited = 0.0
                except TimeoutError:
                    waited += 1.0
                    if waited >= COMMENT_S:
                        yield b": living\n\n"
                        waited = 0.0
        finally:
            self._queues.discard(queue)

    def _put(self, text: bytes) -> None:
        for queue in self._queues:
            # The oldest event goes: the page then reads the present state.
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(text)


def encode_event(event: str, data: Mapping[str, Any]) -> bytes:
    # JSON has no line break, so the data is one line.
    return f"event: {event}\ndata: {msgspec.json.encode(data).decode()}\n\n".encode()
