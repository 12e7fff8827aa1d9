"""Tokens and prompts are those of transformers, whatever file of the folder they come from."""

import json
import subprocess
import sys

import pytest

from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.tasks.text import TaskText
from rollstream.storage.model_folder.hf_tokenizer import (
    has_chat_template,
    is_exact,
    tokenizer_class,
)
from testbed.model_folders.reading import CHAT, TOOL, tokenizer_fault
from testbed.model_folders.tokenizer_folders import TOKENIZER_FOLDERS

FOLDERS = {folder.name: folder for folder in TOKENIZER_FOLDERS}


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_and_prompts_are_transformers_or_the_folder_is_refused(name: str, tmp_path):
    folder = FOLDERS[name]
    folder.write(tmp_path / "model")
    fault = tokenizer_fault(tmp_path / "model", folder.refused, folder.has_tools, tmp_path / "s")
    assert fault == ""


def test_tools_have_the_template_of_their_own_on_every_host(tmp_path):
    FOLDERS["additional_chat_templates"].write(tmp_path)
    text = TaskText(TextTokenizer(tmp_path))
    assert text.prompt(CHAT, (TOOL,)) != text.prompt(CHAT)
    assert has_chat_template(tmp_path)


@pytest.mark.parametrize(
    "name", ["all tokens in tokenizer.json", "truncation and padding", "qwen, its own pipeline"]
)
def test_a_reward_process_reads_common_folders_without_transformers(name: str, tmp_path):
    FOLDERS[name].write(tmp_path)
    assert is_exact(tmp_path)
    code = (
        "import sys; from pathlib import Path;"
        "from rollstream.producers.dialogue.text_tokenizer import TextTokenizer;"
        f"print(TextTokenizer(Path({str(tmp_path)!r})).encode('x<|stop|>')[1:],"
        "'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    stop = TextTokenizer(tmp_path).light.token_to_id("<|stop|>")
    assert done.stdout.split() == [f"[{stop}]", "False"]


def test_a_template_of_an_image_processor_is_no_chat_template(tmp_path):
    FOLDERS["all tokens in tokenizer.json"].write(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'x' }}"}))
    assert not has_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("declared", "model_type", "name"),
    [
        ("PreTrainedTokenizerFast", "qwen3", "TokenizersBackend"),
        ("PreTrainedTokenizerFast", "qwen2", "Qwen2Tokenizer"),  # transformers overrules the folder
        ("Qwen2TokenizerFast", "qwen2", "Qwen2Tokenizer"),
        ("LlamaTokenizerFast", "llama", None),  # depends on more than names
        ("MineTokenizer", "llama", "MineTokenizer"),
    ],
)
def test_the_class_is_found_without_torch(declared, model_type, name, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": declared}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert tokenizer_class(tmp_path) == name
