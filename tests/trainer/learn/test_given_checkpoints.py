"""`model.path`: Hugging Face checkpoints of other tools, and the errors of those that cannot be
trained.
"""

import json
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers

from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.errors import ConfigurationError
from rollstream.run.config.config import load
from rollstream.run.config.run_model import missing_model, model_folder, store_starting_model
from rollstream.run.roles.context import prompt_order
from rollstream.storage.model_folder.hf_folder import small_files
from rollstream.storage.starting_model.models import load_model
from testbed.memory import MemoryStore
from tests.trainer.learn.other_architectures import build_other
from tests.trainer.learn.test_learner_updates import stream, train
from tests.trainer.learning_reference import VOCABULARY, build, settings


def saved(folder, model, dtype=torch.float32, shard="1GB"):
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def change(folder, name="config.json", **fields):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_untied"])
def test_a_16_bit_checkpoint_of_many_files_is_trained(tmp_path, name):
    saved(tmp_path, build(name), torch.bfloat16, shard="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    model = load_model(str(tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "qwen3_tied")
    expected = build(name).model.norm.weight.bfloat16().float()
    assert torch.equal(model.model.norm.weight, expected)
    learner = TorchLearner(model, settings(compute="bfloat16"))
    (metrics,) = train(learner, stream(1))
    learner.close()
    assert metrics["updates_skipped"] == 0
    learner.snapshot("bfloat16")


def test_another_architecture_is_trained_from_its_folder(tmp_path):
    saved(tmp_path, build_other("gpt_neox"))
    learner = TorchLearner(load_model(str(tmp_path)), settings())
    before = learner.snapshot("float32")
    train(learner, stream(1))
    learner.close()
    after = learner.snapshot("float32")
    assert before.keys() == build_other("gpt_neox").state_dict().keys()
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def cached(root, monkeypatch, model):
    """A Hub cache that has `an-owner/tiny`, as `hf download` leaves it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    home = root / "models--an-owner--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    saved(home / "snapshots" / commit, model)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    return home / "snapshots" / commit


def test_a_hub_name_is_found_in_the_cache(tmp_path, monkeypatch):
    folder = cached(tmp_path / "hub", monkeypatch, build("qwen2"))
    assert load_model("an-owner/tiny").config.vocab_size == VOCABULARY
    lines = '[model]\npath = "an-owner/tiny"\n[rollouts]\ncontext_max = 128\n'
    (tmp_path / "run.toml").write_text(lines + "[sampling]\ntokens_max = 64\n")
    configuration = load(tmp_path / "run.toml")
    assert configuration.model.path == "an-owner/tiny"
    assert model_folder(configuration, tmp_path) == folder
    other = load(tmp_path / "run.toml", ["model.path=an-owner/else"])
    assert "or a Hub name in this machine's cache" in str(missing_model(other))
    with pytest.raises(ConfigurationError, match="first run `hf download an-owner/else`"):
        store_starting_model(MemoryStore(), other, tmp_path)


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", "an-owner/never-fetched", "."):
        with pytest.raises(ConfigurationError, match="not a local checkpoint folder"):
            load_model(str(path))
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "of nobody"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="model_type = 'of nobody', which transformers"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigurationError, match="no whole safetensors file"):
        load_model(str(tmp_path))


def test_what_is_no_causal_language_model_is_refused(tmp_path):
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=30, **small))
    with pytest.raises(ConfigurationError, match="no causal language model 'BertForMaskedLM'"):
        load_model(str(saved(tmp_path / "bert", bert)))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=30, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    folder = saved(tmp_path / "t5", t5)
    for changed in ({}, {"architectures": None}):
        with pytest.raises(ConfigurationError, match="'t5', which is no causal language model"):
            load_model(str(change(folder, **changed)))  # pyright: ignore[reportArgumentType]


def test_weights_that_are_missing_are_named_and_not_made_up(tmp_path):
    folder = saved(tmp_path, build("qwen3_untied"), shard="8KB")
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    whole = gone.read_bytes()
    gone.unlink()
    with pytest.raises(ConfigurationError, match=f"lacks {gone.name}"):
        load_model(str(folder))
    gone.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigurationError, match="its download was cut off"):
        load_model(str(folder))
    gone.write_bytes(whole)
    with pytest.raises(ConfigurationError, match=r"has no model\.layers\.2"):
        load_model(str(change(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)))
    with pytest.raises(ConfigurationError, match=r"and its config\.json makes .* with \[99"):
        load_model(str(change(folder, num_hidden_layers=2, layer_types=None, vocab_size=99)))


def test_pickled_and_quantised_weights_are_refused(tmp_path):
    folder = saved(tmp_path, build("qwen2"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="pickled"):
        load_model(str(folder))
    with pytest.raises(ConfigurationError, match="quantised"):
        load_model(str(change(folder, quantization_config={"quant_method": "gptq", "bits": 4})))


def test_versions_carry_what_is_small_and_no_foreign_weights(tmp_path):
    folder = saved(tmp_path, build("qwen2"), shard="8KB")
    for name in ("pytorch_model.bin", "model.onnx", "README.md", "tokenizer.model"):
        (folder / name).write_bytes(b"x")
    (folder / "original.json").mkdir()
    assert set(small_files(folder)) == {
        "config.json",
        "generation_config.json",
        "tokenizer.model",
    }


def run_of(folder, tokens, **task):
    """A configuration of a model with this many tokens."""
    config = transformers.Qwen2Config(
        vocab_size=tokens, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    saved(folder / "given", transformers.Qwen2ForCausalLM(config))
    (folder / "run.toml").write_text(f'[model]\npath = "{folder / "given"}"\n')
    return load(folder / "run.toml")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
    from rollstream.producers.tasks.remainder import Remainder

    size = Remainder().tokenizer().size
    prompt_order(run_of(tmp_path / "enough", size), tmp_path)
    with pytest.raises(ConfigurationError, match=f"has {size - 1} tokens.* up to {size - 1}"):
        prompt_order(run_of(tmp_path / "short", size - 1), tmp_path)
