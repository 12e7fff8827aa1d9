"""The routes of a vLLM server that answer at once, each a call; its streams are `streams.py`'s.

Whatever goes wrong is an `EngineRefused` that names the server and the route, and never the key.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from streams.errors import EngineRefused

ANSWER_S = 60.0
LOAD_S = 600.0  # a chunk of a large model into the memory of all of a server's workers
CONNECT_S = 10.0
NO_REUSE = httpx2.Limits(max_connections=None, max_keepalive_connections=0)


class Routes:
    """Of one server. May be used from several threads."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url.rstrip("/")
        self.host = urlsplit(url).netloc
        self._client = httpx2.Client(
            base_url=self.url,
            headers=dict(headers),
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            # The server closes a connection after an error and after some idle seconds, maybe just
            # as the next request is sent.
            limits=NO_REUSE,
            trust_env=False,  # a proxy between them would end long streams
        )

    def get(self, path: str) -> httpx2.Response:
        """Whatever it answers."""
        return self._send("GET", path)

    def probe(self, path: str) -> int:
        """The status of an empty request there: whether there is such a route."""
        return self._send("POST", path, json={}).status_code

    def post(
        self,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        within_s: float = ANSWER_S,
    ) -> Any:
        """The JSON of a good answer."""
        response = self._send("POST", path, json=body, params=query, timeout=within_s)
        if response.is_error:
            said = response.text[:1000]
            raise EngineRefused(
                f"vLLM server {self.host}: {path} answered {response.status_code}: {said}"
            )
        return response.json() if response.content else None

    def call(self, method: str, *arguments: Any, within_s: float = ANSWER_S) -> list[Any]:
        """What this method of each worker says; `EngineRefused` repeats what one refused."""
        body = {"method": method, "args": list(arguments)}
        answered = self.post("/collective_rpc", body, within_s=within_s)
        results: list[Any] = answered["results"] if answered else []
        for result in results:
            if isinstance(result, dict) and "refused" in result:
                raise EngineRefused(f"vLLM server {self.host}: {result['refused']}")
        return results

    def is_alive(self) -> bool:
        """Whether it answers, and its engine lives."""
        try:
            return self._client.get("/health", timeout=CONNECT_S).is_success
        except httpx2.HTTPError:
            return False

    def close(self) -> None:
        self._client.close()

    def _send(self, verb: str, path: str, **more: Any) -> httpx2.Response:
        try:
            return self._client.request(verb, path, **more)
        except httpx2.HTTPError as error:
            raise EngineRefused(
                f"vLLM server {self.host}: {path} was not answered, it ended or cannot be reached: "
                f"{error or type(error).__name__}"
            ) from error
