"""Requirements on a server before a rollout uses it: each missing one is named, with the command
that starts it. On small web servers; no vLLM runs here.
"""

import json

import pytest

from rollstream.errors import ConfigurationError, EngineRefused
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.remote import factory
from rollstream.producers.engines.vllm.remote.factory import open_remote
from tests.vllm.remote.server import answering
from tests.vllm.vllm_samples import vllm_model

pytestmark = pytest.mark.slow
RIGHT = {"/health": (200, ""), "/version": (200, json.dumps({"version": "0.32.0+cpu"}))}
DESCRIBED = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocabulary": 19,
    "context_max": 96,
    "slots": 4,
    "kv_tokens": 384,
    "logprobs": "processed_logprobs",
    "stream_interval": 1,
    "transfer": "rollstream",
    "device": "cpu",
    "tensor_parallel": 1,
    "engines": 1,
    "drafts": False,
}


def open_at(url: str, api_key_env: str | None = None) -> None:
    settings = VllmSettings(url=url, api_key_env=api_key_env)
    open_remote(vllm_model("qwen3").config, 4, 96, settings)


def answers(**described: object) -> dict[str, tuple[int, str]]:
    body = json.dumps({"results": [DESCRIBED | described]})
    routes = {"/is_paused": (200, "{}"), "/inference/v1/generate": (422, "{}")}
    return RIGHT | routes | {"/collective_rpc": (200, body)}


def test_another_release_is_refused_by_number() -> None:
    other = RIGHT | {"/version": (200, json.dumps({"version": "0.31.2"}))}
    with answering(other) as url, pytest.raises(ConfigurationError, match=r"0\.31\.2.*0\.32"):
        open_at(url)


def test_a_server_without_routes_for_weights_is_refused_with_how_to_start_it() -> None:
    with answering(RIGHT) as url, pytest.raises(ConfigurationError, match="VLLM_SERVER_DEV_MODE=1"):
        open_at(url)


@pytest.mark.parametrize(
    ("route", "status", "named"),
    [
        ("/inference/v1/generate", 403, "has no /inference"),
        ("/inference/v1/generate", 401, "wants a key; it was not given"),
        ("/collective_rpc", 500, "worker extension"),
    ],
)
def test_a_route_that_is_switched_off_is_named(route: str, status: int, named: str) -> None:
    switched = answers() | {route: (status, "{}")}
    with answering(switched) as url, pytest.raises(ConfigurationError, match=named):
        open_at(url)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("transfer", "nccl", "another way"),
        ("logprobs", "raw_logprobs", "raw_logprobs"),
        ("stream_interval", 4, "--stream-interval"),
        ("engines", 2, "several engines"),
        ("drafts", True, "--speculative-config"),
        ("architectures", ["LlamaForCausalLM"], "not Qwen3ForCausalLM"),
        ("vocabulary", 20, "20 tokens"),
        ("slots", 3, "rollouts.slots is 4"),
        ("context_max", 95, "rollouts.context_max is 96"),
    ],
)
def test_what_it_serves_in_another_way_is_named(field: str, value: object, named: str) -> None:
    other = answers(**{field: value})
    with answering(other) as url, pytest.raises(ConfigurationError, match=named):
        open_at(url)


def test_no_answer_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "START_TIMEOUT_S", 0.0)
    with answering({}) as url, pytest.raises(EngineRefused, match="no answer"):
        open_at(url)


def test_a_key_that_is_not_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="NO_SUCH_KEY"):
        open_at("http://127.0.0.1:1", "NO_SUCH_KEY")


@pytest.mark.parametrize("url", ["host:8000", "http://user:pass@host", "ftp://host", "http://"])
def test_a_url_that_is_none_or_holds_credentials_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        VllmSettings(url=url)
