"""The KL to the model of version 0: its loss and gradient, and the same bits after a restart, for
any number of workers, and with adapters.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rollstream.config.config import load
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.errors import ConfigurationError
from rollstream.storage.lora import LoraSettings, attach_adapters
from tests.trainer.learn.test_learner_updates import stream, train, trained
from tests.trainer.learning_reference import build, reference_logprobs, sample, settings

KL = {"reference_kl": 0.5}
FORMS = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.exp(-d) - 1 + d,
}


def test_the_policy_of_version_0_has_no_distance_from_its_reference():
    learner = TorchLearner(build(), settings(**KL))
    first, second = train(learner, stream(2))
    learner.close()
    assert abs(first.get("reference_kl", 0.0)) < 1e-9
    assert second["reference_kl"] > 1e-6


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_metric_is_the_mean_distance_from_the_starting_model(form: str, compute: str):
    chosen = settings(**KL, reference_kl_form=form, lr=3e-3, compute=compute)
    learner = TorchLearner(build(), chosen)
    train(learner, stream(3))
    now = build()
    now.load_state_dict(learner.snapshot("float32"))
    samples = [sample(np.random.default_rng(4), str(i)) for i in range(4)]
    learner.submit(samples)
    found = learner.finish_update()["reference_kl"]
    learner.close()
    with torch.no_grad():
        pairs = [(reference_logprobs(now, s), reference_logprobs(build(), s)) for s in samples]
    apart = torch.cat([new - old for new, old in pairs]).double().numpy()
    expected = float(FORMS[form](apart).mean())
    assert found == pytest.approx(expected, rel=1e-3 if compute == "float32" else 0.3, abs=1e-6)


def test_a_large_weight_keeps_the_policy_near_its_reference():
    updates = stream(6)
    free, held = (
        trained(updates, reference_kl=weight, lr=3e-3).snapshot("float32") for weight in (0.0, 50.0)
    )
    rows = [sample(np.random.default_rng(9), str(i)) for i in range(6)]

    def distance(weights: dict[str, torch.Tensor]) -> float:
        model = build()
        model.load_state_dict(weights)
        with torch.no_grad():
            apart = [reference_logprobs(model, s) - reference_logprobs(build(), s) for s in rows]
        return float(torch.cat(apart).square().mean())

    assert distance(held) < 0.5 * distance(free)


@pytest.mark.parametrize("name", ["qwen3_tied", "gpt2"])
def test_a_restart_has_the_same_reference_and_so_the_same_bits(name: str):
    updates = stream(4)
    whole = trained(updates, name, **KL)
    first = trained(updates[:2], name, **KL)
    second = TorchLearner(build(name), settings(**KL, workers=3))
    second.load_state(first.state())
    train(second, updates[2:])
    second.close()
    assert second.state_hash() == whole.state_hash() != trained(updates, name).state_hash()
    assert first.state().keys() == trained(updates[:2], name).state().keys()


def test_the_reference_of_adapters_is_their_base():
    model = build()
    attach_adapters(model, LoraSettings(rank=2), 5, torch.float32, "base")
    learner = TorchLearner(model, settings(**KL, lr=3e-3))
    first, second = train(learner, stream(2))
    learner.close()
    assert abs(first.get("reference_kl", 0.0)) < 1e-9
    assert second["reference_kl"] > 1e-6


@pytest.mark.parametrize("other", [{"processes": 2}, {"advantage": "batch"}])
def test_what_does_not_go_with_a_reference_is_refused(tmp_path: Path, other: dict[str, object]):
    path = tmp_path / "run.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in {**KL, **other}.items()]
    path.write_text("\n".join(["[trainer]", *lines]))
    with pytest.raises(ConfigurationError, match="reference_kl"):
        load(path)
