"""Versions, exports and other hosts have the tokenizer and the templates that are trained."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from rollstream.look.query.session import TokenText
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.tasks.text import TaskText
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.train import version_files
from rollstream.storage.model_folder.hf_tokenizer import numbered_tokens
from rollstream.storage.starting_model.manifest import MODEL_KEY, ModelSource, describe_model
from rollstream.storage.starting_model.put import check_same_model, put_model
from rollstream.storage.starting_model.reading import StoredModel
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.fetch import export_version
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from testbed.model_folders.reading import CHAT, TOOL
from testbed.model_folders.tokenizer_folders import TEMPLATE, TOKENIZER_FOLDERS
from testbed.model_folders.weight_folders import llama, qwen, write_weights

FOLDERS = {folder.name: folder for folder in TOKENIZER_FOLDERS}


def configured(folder, **task) -> Configuration:
    fields = {"folder": str(folder / "run"), "model": {"path": str(folder / "model")}, "task": task}
    return Configuration.model_validate(fields)


def exported(files, folder):
    """Returns the folder of an exported version with these files."""
    store, version = MemoryStore(), Version(1, 1)
    tensors = {"w": torch.ones(2, 2)}
    publish_version(store, NewVersion("run", version, tensors, files, 1 << 20, 0.0))
    return export_version(store, version, folder, 1 << 20)


def test_an_export_has_every_template_of_the_model(tmp_path):
    write_weights(tmp_path / "model", llama(False))
    FOLDERS["additional_chat_templates"].write(tmp_path / "model")
    files = version_files(configured(tmp_path), tmp_path / "run")
    done = exported(files, tmp_path / "export")
    assert "additional_chat_templates/tool_use.jinja" in done.files
    ours = TaskText(TextTokenizer(tmp_path / "model")).prompt(CHAT, (TOOL,))
    theirs = AutoTokenizer.from_pretrained(done.folder).apply_chat_template(
        CHAT, tools=[TOOL], add_generation_prompt=True, return_dict=False
    )
    assert list(ours) == theirs


def test_an_export_has_the_tokenizer_that_the_task_names(tmp_path):
    write_weights(tmp_path / "model", llama(False))
    FOLDERS["additional_chat_templates"].write(tmp_path / "model")
    FOLDERS["tokens only in added_tokens_decoder"].write(tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text(TEMPLATE + "!")
    configuration = configured(tmp_path, tokenizer=str(tmp_path / "own"))
    files = version_files(configuration, tmp_path / "run")
    done = exported(files, tmp_path / "export")
    assert "config.json" in done.files
    assert not any("tool_use" in name for name in done.files)
    trained, theirs = TextTokenizer(tmp_path / "own"), AutoTokenizer.from_pretrained(done.folder)
    assert list(TaskText(trained).prompt("hi")) == theirs.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize(
    "name", ["tokens only in added_tokens_decoder", "tokens only in added_tokens.json"]
)
def test_viewers_show_tokens_that_tokenizer_json_lacks(name: str, tmp_path):
    FOLDERS[name].write(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tokens = TextTokenizer(tmp_path).encode("a<|turn|>b<|stop|>")
    shown = TokenText(
        lambda: files["tokenizer.json"],
        lambda: numbered_tokens(files.get("tokenizer_config.json"), files.get("added_tokens.json")),
    )
    assert shown.text(tokens) == "a<|turn|>b<|stop|>"
    assert numbered_tokens(b"[1]", b"\xff") == {}


def test_a_tokenizer_that_exports_would_read_otherwise_is_named(tmp_path, caplog):
    """transformers reads every tokenizer beside a configuration of qwen2 by a class of its own."""
    write_weights(tmp_path / "model", qwen(False))
    FOLDERS["all tokens in tokenizer.json"].write(tmp_path / "own")
    version_files(configured(tmp_path, tokenizer=str(tmp_path / "own")), tmp_path / "run")
    assert "by TokenizersBackend, and beside" in caplog.text
    assert "by Qwen2Tokenizer: their tokens may differ" in caplog.text


def test_a_host_with_another_template_beside_the_model_uses_the_stores_files(tmp_path):
    FOLDERS["template in tokenizer_config.json"].write(tmp_path / "model")
    store = MemoryStore()
    source = ModelSource(tmp_path / "model", has_weights=False)
    model = StoredModel(store, put_model(store, "run", source, 0.0))
    given, cache = tmp_path / "model", tmp_path / "cache"
    assert model.host_folder("", given, cache) == given
    (given / "chat_template.jinja").write_text("{{ 'other' }}")
    here = model.host_folder("", given, cache)
    assert here != given
    assert TaskText(TextTokenizer(here)).prompt("hi") != TaskText(TextTokenizer(given)).prompt("hi")


def test_a_run_that_began_without_further_templates_keeps_its_model(tmp_path):
    """An earlier release stored a model without them; its digest stays the run's."""
    FOLDERS["additional_chat_templates"].write(tmp_path)
    source = ModelSource(tmp_path, has_weights=False)
    whole = describe_model(source, "run", 0.0)
    files = tuple(file for file in whole.files if "/" not in file.name)
    old, store = replace(whole, digest="0" * 16, files=files), MemoryStore()
    store.create(MODEL_KEY, encode_json(old))
    assert put_model(store, "run", source, 1.0) == old
    check_same_model(old, source)
    assert StoredModel(store, old).host_folder("", tmp_path, tmp_path / "cache") == tmp_path
