"""Opens a vLLM server after a check of its properties; each error names the command that starts it
correctly.
"""

import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from rollstream.errors import ConfigurationError, EngineRefused
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.local.environment import RELEASE
from rollstream.producers.engines.vllm.local.parameter_map import architecture_of, expected_tensors
from rollstream.producers.engines.vllm.remote.core import RemoteCore
from rollstream.producers.engines.vllm.remote.http import ServerRoutes
from rollstream.producers.engines.vllm.remote.streams import GENERATE_ROUTE
from rollstream.producers.engines.vllm.remote.weights import RemoteWeights

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Longest wait for a server that does not answer, e.g. because it restarts."""
POLL_S = 0.5
LOG_EVERY_S = 15.0
SERVER_COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only --load-format dummy "
    "--worker-extension-cls rollstream.producers.engines.vllm.remote.worker.ServerWorker "
    '--weight-transfer-config \'{"backend": "rollstream"}\' '
    "--logprobs-mode processed_logprobs --generation-config vllm"
)


def open_remote(
    config: PreTrainedConfig, slots: int, context_max: int, settings: VllmSettings
) -> tuple[RemoteCore, RemoteWeights]:
    """Pause the server, drop its requests and claim it from its previous owner. Raises
    `ConfigurationError` for a server that was not started as in `SERVER_COMMAND`, `EngineRefused`
    for one that does not answer.
    """
    assert settings.url is not None, "without a URL vLLM is opened on this machine"
    headers = _headers(settings.api_key_env)
    routes = ServerRoutes(settings.url, headers)
    _wait(routes)
    _check_release(routes)
    _check_routes(routes, settings.api_key_env)
    server = _describe(routes)
    for lack in _find_lacks(server, config, slots, context_max):
        raise _refusal(routes, lack)
    owner = secrets.token_hex(8)
    routes.post("/pause", query={"mode": "abort"})
    routes.call("claim", owner)
    core = RemoteCore(routes, headers, owner, int(server["kv_tokens"]))
    in_place, is_parallel = server["device"] != "cpu", server["tensor_parallel"] > 1
    return core, RemoteWeights(core, expected_tensors(config), in_place, is_parallel)


def _headers(api_key_env: str | None) -> Mapping[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ConfigurationError(
            f"rollouts.vllm.api_key_env: the environment has no {api_key_env}; put the key of the "
            "vLLM server there"
        )
    return {"Authorization": f"Bearer {key}"}


def _wait(routes: ServerRoutes) -> None:
    began = logged = time.monotonic()
    while not routes.is_alive():
        now = time.monotonic()
        if now - began > START_TIMEOUT_S:
            raise EngineRefused(
                f"vLLM server {routes.host}: no answer within {START_TIMEOUT_S:g} s "
                "(rollouts.vllm.url); "
                f"start it with: {SERVER_COMMAND}"
            )
        if now - logged > LOG_EVERY_S:
            logged = now
            log.warning("vLLM server %s does not answer yet; waiting for it", routes.host)
        time.sleep(POLL_S)


def _check_release(routes: ServerRoutes) -> None:
    answered = routes.get("/version")
    release = str(answered.json()["version"]) if answered.is_success else "of an unknown release"
    if not release.startswith(f"{RELEASE}."):
        raise ConfigurationError(
            f"rollouts.vllm.url: vLLM {release} answers at {routes.host}, this engine is written "
            f"for {RELEASE}"
        )


def _check_routes(routes: ServerRoutes, api_key_env: str | None) -> None:
    if routes.get("/is_paused").is_error:
        raise _refusal(routes, "has no routes to pause it and to load weights")
    # The route for tokens.
    status = routes.probe(GENERATE_ROUTE)
    if status == 401:
        key_source = "not given" if api_key_env is None else f"that of {api_key_env}, is another"
        raise ConfigurationError(
            f"rollouts.vllm.api_key_env: vLLM server {routes.host} wants a key; it was {key_source}"
        )
    if status in (403, 404):
        raise _refusal(routes, f"has no {GENERATE_ROUTE}")


def _describe(routes: ServerRoutes) -> Mapping[str, Any]:
    try:
        return routes.call("describe")[0]
    except EngineRefused as error:
        raise _refusal(
            routes, "has not rollstream's worker extension, or its workers ended"
        ) from error


def _find_lacks(
    server: Mapping[str, Any], config: PreTrainedConfig, slots: int, context_max: int
) -> list[str]:
    architecture = architecture_of(config)
    checks = [
        (server["transfer"] == "rollstream", "loads weights in another way"),
        (server["logprobs"] == "processed_logprobs", f"gives {server['logprobs']}"),
        (server["stream_interval"] == 1, "holds tokens back (--stream-interval)"),
        (server["engines"] == 1, "has several engines (one server for each rollout)"),
        (not server["drafts"], "drafts (--speculative-config), which this engine does not support"),
        (
            architecture in server["architectures"],
            f"serves {server['architectures']}, not {architecture}",
        ),
        (server["vocabulary"] == config.vocab_size, f"has {server['vocabulary']} tokens to draw"),
        (
            server["slots"] >= slots,
            f"takes {server['slots']} sequences (--max-num-seqs), rollouts.slots is {slots}",
        ),
        (
            server["context_max"] >= context_max,
            f"takes {server['context_max']} tokens (--max-model-len), rollouts.context_max is "
            f"{context_max}",
        ),
    ]
    # Each is a part of an error message.
    return [lack for is_so, lack in checks if not is_so]


def _refusal(routes: ServerRoutes, lack: str) -> ConfigurationError:
    return ConfigurationError(
        f"rollouts.vllm.url: vLLM server {routes.host} {lack}; start it with: {SERVER_COMMAND} "
        "(docs/how-to/vllm.md)"
    )
