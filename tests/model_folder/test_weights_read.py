"""Every reader of a model folder takes the weights that transformers takes, or refuses it."""

import logging

import pytest
import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.torch.llama_weights import (
    FusedWeights,
    expected_shapes,
    fused_shape,
)
from rollstream.producers.engines.torch.weights import ServedWeights
from rollstream.producers.engines.vllm.local.parameter_map import expected_tensors
from rollstream.storage.model_folder.hf_weights import unread_files
from rollstream.storage.starting_model.models import load_model
from testbed.model_folders.reading import weight_fault
from testbed.model_folders.weight_folders import WEIGHT_FOLDERS, llama

FOLDERS = {folder.name: folder for folder in WEIGHT_FOLDERS}


@pytest.mark.parametrize("name", FOLDERS)
def test_readers_give_transformers_tensors_or_refuse_by_name(name: str, tmp_path):
    FOLDERS[name].write(tmp_path / "model")
    assert weight_fault(tmp_path / "model", FOLDERS[name].refused, tmp_path) == ""


def test_tensors_and_files_that_nobody_uses_are_named_once(tmp_path, caplog):
    FOLDERS["extra tensors"].write(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "README.md").write_text("# A model")
    (tmp_path / "original").mkdir()
    with caplog.at_level(logging.WARNING):
        load_model(str(tmp_path))
    lines = [line for line in caplog.messages if "not used" in line]
    assert len(lines) == 1
    assert "model.layers.2.input_layernorm.weight, mtp.head.weight" in lines[0]
    assert unread_files(tmp_path) == ["original/", "pytorch_model.bin"]


def test_engines_refuse_a_version_with_a_head_that_its_configuration_ties():
    """A trainer of an earlier release could publish one: it untied them, and the engine did not."""
    model = llama(True)
    shape = fused_shape(model.config)
    assert not isinstance(shape, str)
    weights = FusedWeights(shape, torch.float32, torch.device("cpu"))
    served = ServedWeights(weights.views, expected_shapes(shape))
    state = dict(model.state_dict())
    served.fill(state)
    state["lm_head.weight"] = state["lm_head.weight"] * 1.5
    with pytest.raises(EngineRefused, match=r"'lm_head\.weight' that this model does not have"):
        served.fill(state)
    with pytest.raises(EngineRefused, match="tie_word_embeddings"):
        expected_tensors(model.config).check_own(state)
