"""`EngineCore` with a vLLM server, which computes continuously: `pause` also returns the tokens in
transit, since the workers report how many each request has.
"""

import threading
import time
from collections.abc import Iterable, Mapping

from rollstream.errors import EngineRefused
from rollstream.producers.engines.vllm.local.protocol import (
    CoreLoad,
    CoreRequest,
    PauseResult,
    StepOutput,
)
from rollstream.producers.engines.vllm.remote.http import (
    ServerRoutes,
    generate_body,
    parse_load,
    request_name,
)
from rollstream.producers.engines.vllm.remote.streams import TokenStreams

METRICS_POLL_S = 0.5
HEALTH_CHECK_S = 30.0  # time without tokens after which the server must answer a health check


class RemoteCore:
    def __init__(
        self, routes: ServerRoutes, headers: Mapping[str, str], owner: str, kv_capacity: int
    ) -> None:
        self.load = CoreLoad()
        self.loads = 0
        self.kv_capacity = kv_capacity
        self.routes, self.owner = routes, owner
        self._streams = TokenStreams(routes.url, headers, routes.host)
        self._count = 0
        self._received_s = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._poll_metrics, name="vllm-metrics", daemon=True).start()

    def add(self, request: CoreRequest) -> None:
        self._count += 1
        name = f"{self.owner}.{self._count}"
        if not len(self._streams):
            self._received_s = time.monotonic()
        self._streams.begin(request.key, name, generate_body(request, name))

    def step(self, wait_s: float) -> list[StepOutput]:
        outputs = self._streams.take(wait_s)
        now = time.monotonic()
        if outputs:
            self._received_s = now
        elif now - self._received_s > HEALTH_CHECK_S:
            if not self.routes.is_alive():
                raise EngineRefused(f"vLLM server {self.routes.host}: it no longer responds")
            self._received_s = now
        return outputs

    def pause(self) -> PauseResult:
        """Make the server pause, and return all tokens that it had generated before.

        1. Stop the server's steps. 2. Get the number of tokens of each request from the workers. 3.
        Drop requests that they do not have (not started, or just ended), and read the others up to
        that number.
        """
        self.routes.call("check_owner", self.owner)
        self.routes.post("/pause", query={"mode": "keep", "clear_cache": "false"})  # 1
        progress = self._progress()  # 2
        names = self._streams.names()
        counts = {key: progress[name] for key, name in names.items() if name in progress}
        unknown = names.keys() - counts.keys()
        outputs = self._streams.take(0.0)  # 3
        self._streams.close(unknown)
        self._streams.settle({key: n for key, n in counts.items() if key in self._streams.names()})
        return PauseResult(outputs + self._streams.take(0.0), frozenset(unknown))

    def resume(self) -> None:
        self._received_s = time.monotonic()
        self.routes.post("/resume")

    def drop(self, keys: Iterable[str]) -> None:
        self._streams.close(keys)

    def reset_cache(self) -> None:
        answered = self.routes.post("/reset_prefix_cache", query={"reset_running_requests": "true"})
        if not answered["success"]:
            raise EngineRefused(
                f"vLLM server {self.routes.host}: its prefix cache could not be emptied"
            )

    def release(self) -> None:
        self._closed.set()
        self._streams.close_all()

    def _progress(self) -> dict[str, int]:
        inside = self.routes.call("progress")[0]
        # By the client's names of the requests.
        return {request_name(name): int(count) for name, count in inside.items()}

    def _poll_metrics(self) -> None:
        while not self._closed.wait(METRICS_POLL_S):
            if not len(self._streams):
                continue
            try:
                self.load = parse_load(self.routes.get("/metrics").text.splitlines())
            except EngineRefused:  # if the server failed, the streams report it
                continue
        self.routes.close()
