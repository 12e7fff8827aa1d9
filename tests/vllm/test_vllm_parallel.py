"""One engine over two workers, here two processes on the CPU: each takes its slice of a version,
and together they give the tokens of one.
"""

import pytest

from rollstream.producers.engines.base import EngineOptions, WeightComparison, WeightUpdate
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.producers.engines.vllm.staging import StagedFile
from rollstream.producers.settings import VllmSettings
from rollstream.streams.values import Sampling
from tests.support.engine_samples import V1, V2, ask, prompt, run_all
from tests.vllm.vllm_samples import open_vllm, vllm_model

pytestmark = pytest.mark.slow
GREEDY = Sampling(temperature=0, tokens_max=40)


def test_each_worker_takes_its_slice_and_the_tokens_are_those_of_one() -> None:
    old, new = vllm_model("qwen3", 0), dict(vllm_model("qwen3", 1).state_dict())
    settings = VllmSettings(tensor_parallel=2)
    two = VllmEngine(old.config, old.state_dict(), V1, EngineOptions(4, 96), settings=settings)
    one = open_vllm(old)
    for version in (V1, V2):
        asked = [ask(f"{version}.{i}", prompt(6, i), GREEDY) for i in range(3)]
        mine, wanted = run_all(two, asked), run_all(one, asked)
        assert {name: m.tokens for name, m in mine.items()} == {
            name: w.tokens for name, w in wanted.items()
        }
        assert all(m.spans == [(version, 40)] for m in mine.values())
        if version == V1:
            two.update(two.prepare(WeightUpdate(V2, new)), "in_flight")
            one.update(WeightUpdate(V2, new), "in_flight")
    name = "model.layers.1.mlp.up_proj.weight"  # cut by rows
    for worker, rows in enumerate(new[name].chunk(2)):
        staged = StagedFile([(name, rows)])
        differs = two._core._engine.collective_rpc(  # pyright: ignore[reportAttributeAccessIssue]
            "differs_from_staged", args=(staged.path, staged.entries)
        )
        assert differs == [worker != 0, worker != 1]
        staged.close()
    assert two.read_back(new, new) == WeightComparison(0, ())  # the split of tensors is not logged
