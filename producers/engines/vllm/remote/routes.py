"""HTTP calls to the routes of a vLLM server that answer at once; token streams are in `streams.py`.

Every failure is an `EngineRefused` that names the server and the route, and never the key.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from rollstream.errors import EngineRefused

ANSWER_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0  # a chunk of a large model into the memory of all of a server's workers
CONNECT_TIMEOUT_S = 10.0
NO_REUSE = httpx2.Limits(max_connections=None, max_keepalive_connections=0)


class ServerRoutes:
    """The routes of one server. Thread-safe."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url.rstrip("/")
        self.host = urlsplit(url).netloc
        self._client = httpx2.Client(
            base_url=self.url,
            headers=dict(headers),
            timeout=httpx2.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            # The server closes a connection after an error and after some idle seconds, possibly
            # while the next request is being sent.
            limits=NO_REUSE,
            trust_env=False,  # a proxy would end long streams
        )

    def get(self, path: str) -> httpx2.Response:
        """The response, whatever its status."""
        return self._send("GET", path)

    def probe(self, path: str) -> int:
        """The status of an empty request, which shows whether the route exists."""
        return self._send("POST", path, json={}).status_code

    def post(
        self,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        within_s: float = ANSWER_TIMEOUT_S,
    ) -> Any:
        """The JSON of a successful response."""
        response = self._send("POST", path, json=body, params=query, timeout=within_s)
        if response.is_error:
            said = response.text[:1000]
            raise EngineRefused(
                f"vLLM server {self.host}: {path} answered {response.status_code}: {said}"
            )
        return response.json() if response.content else None

    def call(self, method: str, *arguments: Any, within_s: float = ANSWER_TIMEOUT_S) -> list[Any]:
        """The result of this method of each worker. Raises `EngineRefused` with a worker's
        refusal.
        """
        body = {"method": method, "args": list(arguments)}
        answered = self.post("/collective_rpc", body, within_s=within_s)
        results: list[Any] = answered["results"] if answered else []
        for result in results:
            if isinstance(result, dict) and "refused" in result:
                raise EngineRefused(f"vLLM server {self.host}: {result['refused']}")
        return results

    def is_alive(self) -> bool:
        """Whether the server answers and its engine runs."""
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
