"""`trainer.compile`: compiled layers learn the same up to rounding; without a compiler the setting
is refused by its name.
"""

import pytest
import torch

from rollstream.consumers.trainer.learn.forward import compile_layers, policy_scorer
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.errors import ConfigurationError
from tests.trainer.learn.test_learner_updates import stream, train
from tests.trainer.learning_reference import build, largest_difference, settings


@pytest.mark.long
def test_compiled_layers_learn_the_same():
    """In the other forms of a pass too: recomputed layers over joined sequences."""
    states, forms = [], {"gradient_checkpointing": True, "varlen_attention": True}
    for compiles in (False, True):
        learner = TorchLearner(build(), settings(compile=compiles, **forms))
        train(learner, stream(2))
        learner.close()
        states.append(learner.snapshot("float32"))
    assert largest_difference(*states) < 1e-4
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_without_a_compiler_the_setting_is_refused(monkeypatch, tmp_path):
    torch._dynamo.reset()  # what another test compiled  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    with pytest.raises(ConfigurationError, match=r"trainer\.compile: .* set it to false"):
        policy_scorer(build(), compiles=True)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ConfigurationError, match=r"trainer\.compile: Linear has no layers"):
        compile_layers(torch.nn.Linear(2, 2))
