"""vLLM in bfloat16 with its output head in float32: nearer to what the trainer computes."""

import numpy as np
import pytest
import torch

from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.streams.values import Sampling
from tests.support.engine_samples import V1, ask, prompt, run_all
from tests.vllm.vllm_samples import vllm_model

pytestmark = pytest.mark.slow


def mean_error(head_float32: bool) -> float:
    """|Δ log p| of a model that rounds only in its head: layers add nothing, and the output of the
    last norm is ±1.
    """
    model = vllm_model("llama").to(torch.bfloat16).float()  # pyright: ignore[reportArgumentType]
    state = dict(model.state_dict())
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name] = torch.zeros_like(tensor)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].sign()
    state["model.norm.weight"] = torch.ones_like(state["model.norm.weight"])
    model.load_state_dict(state)
    settings = VllmSettings(process=False, dtype="bfloat16", head_float32=head_float32)
    engine = VllmEngine(model.config, state, V1, EngineOptions(4, 96), settings=settings)
    tokens = prompt(6)
    mine = run_all(engine, [ask("t", tokens, Sampling(tokens_max=60))])["t"]
    whole = torch.tensor([[*tokens.tolist(), *mine.tokens]])
    with torch.inference_mode():
        logprobs = model(input_ids=whole).logits[0].log_softmax(-1)
    wanted = [float(logprobs[5 + at, token]) for at, token in enumerate(mine.tokens)]
    return float(np.abs(np.array(mine.logprobs) - np.array(wanted)).mean())


def test_a_float32_head_is_that_of_the_trainer() -> None:
    assert mean_error(head_float32=True) < 1e-5
    assert mean_error(head_float32=False) > 1e-4
