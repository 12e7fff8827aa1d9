"""Compares what our readers take from a model's folder with what transformers takes
(`weight_fault`, `tokenizer_fault`). Both return "" if everything is the same.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollstream.errors import ConfigurationError, EngineRefused
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.engines.torch.llama_weights import (
    FusedWeights,
    expected_shapes,
    fused_shape,
)
from rollstream.producers.engines.torch.weights import ServedWeights
from rollstream.producers.engines.vllm.local.parameter_map import expected_tensors
from rollstream.producers.tasks.text import TaskText
from rollstream.storage.model_folder.hf_folder import BOM, read_small_file, small_files
from rollstream.storage.model_folder.model_fit import read_model_config
from rollstream.storage.starting_model.manifest import ModelSource
from rollstream.storage.starting_model.models import (
    load_empty_model,
    load_model,
    load_stored_model,
    parameter_names,
)
from rollstream.storage.starting_model.put import put_model
from rollstream.storage.starting_model.reading import StoredModel
from rollstream.storage.starting_model.rows import ModelRows
from rollstream.storage.stores.file import FileStore

Tensors = Mapping[str, torch.Tensor]
TEXTS = (
    "The quick brown fox", "don't YOU'LL", "12345 3.14", "a\n\n  b\t", "naïve Größe", "  two",
    "e\u0301A\u030a", "<|turn|>user <|stop|>", " <|turn|> x", "<|start|>", "<|more|><|image|>", "",
    "日本語 🙂",
)  # fmt: skip
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {}},
}
CHAT = [{"role": "user", "content": "Größe of the fox?"}]


def weight_fault(folder: Path, refused: str, scratch: Path) -> str:
    """Returns how a reader's tensors differ from transformers'. With `refused` every reader must
    refuse the folder with these words.
    """
    readers: dict[str, Callable[[], Tensors]] = {
        "one process": lambda: load_model(str(folder)).state_dict(),
        "ranks": lambda: _by_rows(folder),
        "store": lambda: _stored(folder, scratch),
    }
    if refused:
        return _first(_not_refused(name, read, refused) for name, read in readers.items())
    theirs: Tensors = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    published: Tensors = {}
    for name, read in readers.items():
        ours = read()
        published = published or ours
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[n], theirs[n]) for n in ours):
            return f"{name}: other tensors"
    return _engine_fault(folder, published, theirs)


def _first(faults: Iterable[str]) -> str:
    return next(filter(None, faults), "")


def _not_refused(name: str, read: Callable[[], object], words: str) -> str:
    try:
        read()
    except ConfigurationError as error:
        return "" if words in str(error) else f"{name}: refused without {words!r}: {error}"
    return f"{name}: not refused"


def _by_rows(folder: Path) -> Tensors:
    """Returns the tensors as ranks read them: by rows, or whole if names are converted."""
    empty = load_empty_model(str(folder))
    if empty is None:
        return load_model(str(folder)).state_dict()
    model, rows = empty
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    for names in parameter_names(model):
        held = next(name for name in names if name in rows)
        shape = rows.shape(held)
        for name in names:
            state[name] = rows.rows(held, 0, shape[0])
    return state


def _stored(folder: Path, scratch: Path) -> Tensors:
    """Returns the tensors of the model in a store, read where the folder is not."""
    store = FileStore(scratch / "store")
    model = StoredModel(store, put_model(store, "run", ModelSource(folder), 0.0))
    here = model.host_folder("", None, scratch / "here")
    return load_stored_model(str(here), ModelRows(model)).state_dict()


def _engine_fault(folder: Path, published: Tensors, theirs: Tensors) -> str:
    """Returns whether the engines serve other tensors than transformers' after they loaded the
    version that the trainer publishes.
    """
    config = read_model_config(folder)
    expected = expected_tensors(config)
    try:
        expected.check_own(published)
        shape = fused_shape(config)
        if isinstance(shape, str):
            return ""
        weights = FusedWeights(shape, torch.float32, torch.device("cpu"))
        served = ServedWeights(weights.views, expected_shapes(shape))
        served.fill(published)
    except EngineRefused as error:
        return f"engine: refuses the version: {error}"
    if differing := served.compare(theirs.keys(), theirs).differing:
        return f"engine: serves another {differing[0]}"
    return ""


def tokenizer_fault(folder: Path, refused: str, has_tools: bool, scratch: Path) -> str:
    """Returns how tokens or prompts differ from transformers', in the folder, in the store's copy
    of it, or in the files that every version carries.
    """
    if refused:
        return _not_refused("tokenizer", lambda: TextTokenizer(folder).whole, refused)
    copy = _copied(folder, scratch)
    has_marks = any(path.read_bytes()[:3] == BOM for path in small_files(folder).values())
    theirs: Any = AutoTokenizer.from_pretrained(copy if has_marks else folder)
    readers = {"folder": folder, "store": copy}
    return _first(
        f"{name}: {fault}" if (fault := _prompt_fault(place, theirs, has_tools)) else ""
        for name, place in readers.items()
    )


def _copied(folder: Path, scratch: Path) -> Path:
    store = FileStore(scratch / "store")
    source = ModelSource(folder, str(folder), has_weights=False)
    model = StoredModel(store, put_model(store, "run", source, 0.0))
    copy = model.host_folder("", None, scratch / "here")
    there = {name: read_small_file(path) for name, path in small_files(folder).items()}
    assert there == {name: path.read_bytes() for name, path in small_files(copy).items()}
    return copy


def _prompt_fault(place: Path, theirs: Any, has_tools: bool) -> str:
    light, whole = TextTokenizer(place), TextTokenizer(place)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        if (mine := light.encode(text)) != ids:
            return f"tokens of {text!r}: {mine}, transformers has {ids}"
        if light.decode(ids) != theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        ):
            return f"text of {ids}"
    if list(TaskText(light, "plain").prompt("The fox")) != theirs.encode("The fox"):
        return "a plain prompt"
    if theirs.eos_token_id is not None and theirs.eos_token_id not in light.ends:
        return f"the end token {theirs.eos_token_id} is not in {sorted(light.ends)}"
    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    if dict(whole.special) != {n: i for n in special if (i := getattr(theirs, n)) is not None}:
        return "the special tokens"
    for tools in ([], [TOOL]) if has_tools else ([],):
        ours = TaskText(whole).prompt(CHAT, tools)
        rendered = theirs.apply_chat_template(
            CHAT, tools=tools or None, add_generation_prompt=True, tokenize=True,
            return_dict=False,
        )  # fmt: skip
        if list(ours) != rendered:
            return f"a prompt with {len(tools)} tools: {ours}, transformers has {rendered}"
    return ""
