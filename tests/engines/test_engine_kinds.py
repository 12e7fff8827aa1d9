"""Every kind of engine answers what a run asks before it opens one, and a new engine needs a folder
of its own and its name.
"""

import subprocess
import sys
from collections.abc import Mapping
from typing import get_args

import pytest
import torch

from rollstream.consumers.settings import TrainerSettings
from rollstream.errors import ConfigurationError
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.base import Engine
from rollstream.producers.engines.kind import (
    ENGINES,
    EngineKind,
    EngineTables,
    ServedModel,
    engine_kind,
    has_model,
)
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.settings import RolloutSettings
from rollstream.run.config.config import load_layers, validate_layers
from rollstream.run.config.settings import Configuration, setting_problems
from rollstream.streams.values import Version
from testbed.repository import ROOT
from tests.support import engine_samples

LEARNERS = get_args(TrainerSettings.model_fields["learner"].annotation)


def configured(*settings: str) -> Configuration:
    return validate_layers(load_layers(None, settings, {}))


class PlainKind(EngineKind):
    """The least that a new engine says of itself."""

    name = "plain"

    def open(
        self,
        c: EngineTables,
        model: ServedModel,
        tensors: Mapping[str, torch.Tensor],
        version: Version,
        options: EngineOptions,
    ) -> Engine:
        return TorchEngine(model.config(), tensors, version, options)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ENGINES, "plain", f"{__name__}:PlainKind")  # pyright: ignore[reportArgumentType]
    return "plain"


@pytest.mark.parametrize("name", ENGINES)
def test_a_kind_loads_neither_its_engine_nor_torch(name: str) -> None:
    code = (
        "import sys; from rollstream.producers.settings import RolloutSettings; "
        f"r = RolloutSettings(engine={name!r}); k = r.kind; "
        "k.cards(r), k.memory_share(r), k.dtype(r), k.computes_on(r), k.package(r), "
        "k.is_server(r), k.can_draft(r), k.adapter_problem(r), k.timed_settings(r), "
        "list(k.fitted_defaults(lambda key: None)), k.evaluating(r); "
        "print(k.name, *(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules))))"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [name]


@pytest.mark.parametrize("name", ENGINES)
def test_a_kind_says_of_itself_what_a_run_accepts(name: str) -> None:
    c = configured(f"rollouts.engine={name}", "model.path=unread")
    kind, r = c.rollouts.kind, c.rollouts
    assert (kind.name, kind.learner) == (name, c.trainer.learner)
    assert kind.learner in LEARNERS
    assert not setting_problems(c)
    assert kind.cards(r) >= 1
    assert 0 <= kind.memory_share(r) <= 1
    assert all(kind.has_model for kind in [kind.evaluating(r)] if c.evaluation.enabled)
    keys = [key for key in c.model_dump() for table in kind.tables if table.startswith(f"{key}.")]
    assert len(keys) == len(kind.tables)
    assert has_model(name) is kind.has_model is c.has_model


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_learner_that_was_set_brings_its_engine(learner: str) -> None:
    c = configured(f"trainer.learner={learner}", "model.path=unread")
    assert c.rollouts.kind.learner == learner


def test_a_server_by_url_computes_nothing_on_this_machine() -> None:
    own = RolloutSettings(engine="vllm")
    other = RolloutSettings(engine="vllm", vllm=VllmSettings(url="http://host:8000"))
    kind = engine_kind("vllm")
    assert (kind.computes_on(own), kind.computes_on(other)) == ({"cuda"}, frozenset())
    assert (kind.package(own), kind.package(other)) == (("vllm", "vllm"), None)
    assert (kind.evaluating(own).name, kind.evaluating(other).name) == ("vllm", "torch")
    assert (kind.can_draft(own), kind.can_draft(other)) == (True, False)
    assert (kind.adapter_problem(own), kind.adapter_problem(other) or ("",))[1][0] == (
        "rollouts.vllm.url"
    )


def test_a_new_engine_needs_its_name_and_how_it_is_opened(plain: str) -> None:
    c = configured("rollouts.engine=plain", "model.path=unread")
    assert not setting_problems(c)
    assert not c.rollouts.can_draft
    model = engine_samples.tiny_model("llama")
    options = EngineOptions(slots=2, context_max=64)
    engine = open_engine(plain, model.config, model.state_dict(), engine_samples.V1, options)
    assert engine.version == engine_samples.V1
    with pytest.raises(ConfigurationError, match="they serve adapters, got 'plain'"):
        configured("rollouts.engine=plain", "model.path=unread", "model.lora.rank=4")


def test_an_engine_that_nobody_knows_is_named_alone() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"engine must be one of torch, vllm, paced, got 'tensorrt' \(rollouts",
    ):
        configured("rollouts.engine=tensorrt", "model.path=unread", "model.lora.rank=4")
    with pytest.raises(ConfigurationError, match="tensorrt"):
        engine_kind("tensorrt")
    assert has_model("tensorrt")
    assert has_model(None)
