"""Real servers of each HTTP layer that a damaged request meets (`open_servers`)."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rollstream.run.metrics.endpoint import TEXT, PageResponse, serve_pages
from rollstream.storage.relay.cache import RelayCache
from rollstream.storage.relay.client import BandwidthLimiter
from rollstream.storage.relay.server import RelayServer
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue
from testbed.agents.rollout import agent_rollout, assignment
from testbed.explorer_server import serving
from testbed.hostile.parsers.http import ServerRoutes
from testbed.repository import ROOT

SERVERS = ("metrics", "relay", "agents", "explorer")


def _metrics(accept: str) -> PageResponse:
    return 200, TEXT, b"m\n"


@contextmanager
def open_server(name: str, folder: Path) -> Generator[ServerRoutes]:
    """Serve until the block ends; files lie in `folder`."""
    with ExitStack() as opened:
        match name:
            case "metrics":
                metrics = serve_pages("127.0.0.1", 0, {"/metrics": _metrics})
                opened.callback(metrics.end)
                yield ServerRoutes(metrics.port, ("/metrics", "/"), "/metrics")
            case "relay":
                cache = RelayCache(folder / "cache", versions_max=2, bytes_max=1 << 20)
                opened.callback(cache.close)
                relay = RelayServer(("127.0.0.1", 0), cache, BandwidthLimiter(), 8, dict)
                opened.callback(relay.end)
                key = "/weights/v00000001-t0001/model-00001-of-00001.safetensors"
                yield ServerRoutes(relay.port, (key, "/status", f"{key}?wait=0"), "/status")
            case "agents":
                bus = open_bus(f"sqlite:{folder / 'bus'}")
                bus.create(catalogue(1))
                rollout = opened.enter_context(agent_rollout(bus))
                rollout.assign(assignment())
                routes = ("/health", "/v1/models", "/sessions", "/v1/chat/completions",
                          "/sessions/0.0", "/sessions/0.0/reward", "/inference/v1/generate",
                          f"/sessions/{rollout.key()}/v1/completions")  # fmt: skip
                yield ServerRoutes(rollout.endpoint.port, routes, "/health")
            case _:
                archive = str(ROOT / "examples" / "archive")
                explorer = opened.enter_context(serving([archive]))
                routes = ("/", "/page/app.js", "/api/runs", "/api/r/0/steps", "/api/r/0/map/lag",
                          "/api/r/0/search?q=1&order=reward&limit=5", "/api/r/0/groups/3",
                          "/api/r/0/lanes?first=1", "/api/r/0/records/ledger/0/5",
                          "/api/compare?runs=0", "/api/r/0/trajectories/3.0?from=1",
                          "/api/r/0/search?reward_min=0.5&cursor=1~3.0")  # fmt: skip
                yield ServerRoutes(explorer.port, routes, "/api/runs")
