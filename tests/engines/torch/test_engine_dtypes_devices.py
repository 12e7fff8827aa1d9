"""Cases that a CPU in fp32 does not cover: the attention of other devices, and half precision."""

import numpy as np
import pytest
import torch

from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch import attention
from rollstream.producers.engines.torch.attention import KVCache, KVShape
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.engines.torch.rows import RowSegment
from rollstream.streams.values import Sampling
from tests.support.engine_samples import V1, ask, chosen_logprobs, prompt, run_all, tiny_model


def test_attention_of_other_devices_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, shape = torch.device("cpu"), KVShape(layers=1, heads=2, width=8)
    cache = KVCache(shape, 5, 32, torch.float32, cpu)
    cache.data.normal_(generator=torch.manual_seed(0))
    cache.column = 30
    for row, length in enumerate([25, 20, 7, 3, 0]):
        cache.write(row, torch.randn(2, 2, length, 8))
    used = (RowSegment(0, 2, 5), RowSegment(2, 5, 23))
    queries = torch.randn(5, 2, 3, 8)
    masks = attention.segment_masks(cache, used)
    found = attention.attend(queries, 0, cache, used, masks)
    monkeypatch.setattr(attention, "_kind", lambda queries: attention._fused)  # pyright: ignore[reportPrivateUsage, reportUnknownLambdaType]
    wanted = attention.attend(queries, 0, cache, used, masks)
    heads = wanted.view(5, 2, 3, 8)
    torch.testing.assert_close(found.view(5, 2, 3, 8), heads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_half_precision_stays_near_fp32(family: str) -> None:
    model = tiny_model(family).to(torch.bfloat16).float()  # pyright: ignore[reportArgumentType]
    engine = TorchEngine(
        model.config, model.state_dict(), V1, EngineOptions(2, 64), dtype=torch.bfloat16
    )
    mine = run_all(engine, [ask("t", prompt(6), Sampling(tokens_max=40))])["t"]
    wanted = chosen_logprobs(model, prompt(6), mine.tokens).numpy()
    assert np.abs(np.array(mine.logprobs) - wanted).mean() < 0.05


def test_the_head_of_half_precision_is_computed_in_fp32() -> None:
    """Where layers add nothing, the log-probabilities equal those of an engine that is all fp32."""
    model = tiny_model("llama").to(torch.bfloat16).float()  # pyright: ignore[reportArgumentType]
    state = dict(model.state_dict())
    for name in state:
        if name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight")):
            state[name] = torch.zeros_like(state[name])
    asked = ask("t", prompt(6), Sampling(tokens_max=40))
    half, whole = (
        run_all(TorchEngine(model.config, state, V1, EngineOptions(2, 64), dtype=dtype), [asked])[
            "t"
        ]
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert half.tokens == whole.tokens
    np.testing.assert_allclose(half.logprobs, whole.logprobs, atol=1e-5)
