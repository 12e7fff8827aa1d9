"""`rollouts.vllm.args` reaches vLLM's engine, an unknown argument is refused by its nearest name,
and no user may set what the run sets.
"""

from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import OWN_ARGUMENTS, EngineArgument, VllmSettings
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.producers.engines.vllm.local.core import own_arguments
from rollstream.producers.engines.vllm.local.environment import VllmShape, require_vllm
from rollstream.run.config.config import load
from rollstream.run.roles.rollout import measure_profile
from testbed.repository import EXAMPLES
from tests.support.engine_samples import V1
from tests.vllm.vllm_samples import vllm_model

pytestmark = pytest.mark.slow
NEAREST = r"no argument 'quantisation'; did you mean 'quantization'"
MAY_BE_SET = {"enforce_eager", "enable_chunked_prefill", "max_num_batched_tokens", "block_size"}
"""Set by the run on the CPU only; on a GPU they are vLLM's, or the user's."""

NEVER_SET = {"data_parallel_size"}
"""vLLM opens with it, but all requests and all weights reach one replica."""


def opened(args: dict[str, EngineArgument]) -> VllmEngine:
    model = vllm_model("llama")
    settings = VllmSettings(process=False, args=args)
    return VllmEngine(model.config, model.state_dict(), V1, EngineOptions(4, 96), settings=settings)


def test_an_argument_reaches_vllm() -> None:
    core = opened({"seed": 7, "max_logprobs": 3})._core
    config = core._engine.vllm_config.model_config  # pyright: ignore[reportAttributeAccessIssue]
    assert (config.seed, config.max_logprobs) == (7, 3)


def test_an_unknown_argument_is_refused_by_its_nearest_name() -> None:
    with pytest.raises(ConfigurationError, match=NEAREST):
        opened({"quantisation": "fp8"})


def test_a_profile_opens_the_engine_with_them(tmp_path: Path) -> None:
    settings = ["rollouts.engine=vllm", "rollouts.vllm.args.quantisation=fp8"]
    c = load(EXAMPLES / "vllm-cpu.toml", settings, {})
    with pytest.raises(ConfigurationError, match=NEAREST):
        measure_profile(c, tmp_path, lambda point: None)


def test_what_the_run_sets_is_refused_to_users() -> None:
    require_vllm()
    own = own_arguments("folder", VllmShape(4, 96, "float32", False))
    assert set(own) == set(OWN_ARGUMENTS) - NEVER_SET | MAY_BE_SET
