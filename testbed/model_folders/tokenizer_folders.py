"""Folders with a tokenizer (`TOKENIZER_FOLDERS`), over the files, classes and flags from which
transformers takes its tokens and templates.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from rollstream.storage.model_folder.hf_tokenizer import QWEN_SPLIT

START, STOP, PAD, TURN = "<|start|>", "<|stop|>", "<|pad|>", "<|turn|>"
ROLES = {"bos_token": START, "eos_token": STOP, "pad_token": PAD}
TEMPLATE = (
    "{{ '<|start|>' }}{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content']"
    " + '<|stop|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
TOOLS = TEMPLATE.replace("'<|start|>'", "'<|start|>tools:' ~ tools | length")
CORPUS = ["The quick brown fox jumps over the lazy dog.", "don't you'll 12345 3.14 naïve Größe",
          "def f(x):\n    return x + 1\n\n", "Wörter wörter Worte the theory"] * 8  # fmt: skip
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """One folder: `write` makes it. One that transformers cannot read is `refused` by us, too, with
    these words. With `has_tools` its template for tools is another one.
    """

    name: str
    write: Callable[[Path], None]
    refused: str = ""
    has_tools: bool = False


def trained(special: bool = True, pipeline: str = "levels") -> Tokenizer:
    """Returns a small byte-level tokenizer with merges; `special`: its file has its own tokens."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pipeline == "qwen":
        made.normalizer = normalizers.NFC()
        own = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([own, split])
    elif pipeline == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.Metaspace() if pipeline == "metaspace" else decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=letters)
    made.train_from_iterator(CORPUS, trainer)
    if special:
        names = (START, STOP, PAD, TURN, *(("<|endoftext|>",) if pipeline == "qwen" else ()))
        made.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return made


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, fields: Fields, template: str = TEMPLATE, **files: Fields
) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` with these `fields`, the template as a file
    unless it is empty, and further JSON files by their names without ending.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    generic = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in {"tokenizer_config": generic | fields, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write(**options: Any) -> Callable[[Path], None]:
    tokenizer: Callable[[], Tokenizer] = options.pop("tokenizer", trained)
    fields: Fields = options.pop("fields", ROLES)
    return lambda folder: write_tokenizer(folder, tokenizer(), fields, **options)


def _entry(content: str, **flags: bool) -> Fields:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"content": content, "special": True, **plain, **flags}


def _bare() -> Tokenizer:
    return trained(special=False)


def _numbered() -> dict[str, Fields]:
    size = _bare().get_vocab_size()
    return {str(size + n): _entry(name) for n, name in enumerate((START, STOP, PAD, TURN))}


def _added(folder: Path) -> None:
    size = _bare().get_vocab_size()
    numbers = {name: size + n for n, name in enumerate((START, STOP, PAD, TURN))}
    write_tokenizer(folder, _bare(), ROLES, added_tokens=numbers)


def _more_templates(folder: Path, template: str = TEMPLATE) -> None:
    write_tokenizer(folder, trained(), ROLES, template)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)


def _marked(folder: Path) -> None:
    write_tokenizer(folder, _bare(), ROLES | {"added_tokens_decoder": _numbered()})
    for path in list(folder.iterdir()):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def _cut() -> Tokenizer:
    made = trained()
    made.enable_truncation(3)
    made.enable_padding(length=8)
    return made


def _begun() -> Tokenizer:
    made = trained()
    start = made.token_to_id(START)
    made.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, start)]
    )
    return made


def _qwen() -> Tokenizer:
    return trained(pipeline="qwen")


def _metaspace() -> Tokenizer:
    return trained(pipeline="metaspace")


QWEN = ROLES | {"tokenizer_class": "Qwen2Tokenizer"}
LLAMA = ROLES | {"tokenizer_class": "LlamaTokenizerFast"}
OWN_CODE = {"AutoTokenizer": ["x.Mine", None]}
TOKENIZER_FOLDERS = (
    TokenizerFolder("all tokens in tokenizer.json", _write()),
    TokenizerFolder("roles only in tokenizer_config.json", _write(tokenizer=_bare)),
    TokenizerFolder("tokens only in added_tokens_decoder",
                    _write(tokenizer=_bare, fields=ROLES | {"added_tokens_decoder": _numbered()})),
    TokenizerFolder("tokens only in added_tokens.json", _added),
    TokenizerFolder("roles only in special_tokens_map.json",
                    _write(tokenizer=_bare, fields={}, special_tokens_map=ROLES)),
    TokenizerFolder("special_tokens_map.json names another end",
                    _write(special_tokens_map=ROLES | {"eos_token": TURN})),
    TokenizerFolder("additional_special_tokens",
                    _write(tokenizer=_bare,
                           fields=ROLES | {"additional_special_tokens": [TURN, "<|more|>"]})),
    TokenizerFolder("tokens of the model's own",
                    _write(fields=ROLES | {"image_token": "<|image|>"})),
    TokenizerFolder("flags of a token differ",
                    _write(fields=ROLES | {"added_tokens_decoder": {
                        str(_bare().get_vocab_size() + 3): _entry(TURN, lstrip=True)}})),
    TokenizerFolder("template in tokenizer_config.json",
                    _write(template="", fields=ROLES | {"chat_template": TEMPLATE})),
    TokenizerFolder("templates in a list", _write(template="", fields=ROLES | {"chat_template": [
        {"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOLS}]}),
        has_tools=True),
    TokenizerFolder("additional_chat_templates", _more_templates, has_tools=True),
    TokenizerFolder("another template in the configuration",
                    _write(fields=ROLES | {"chat_template": "{{ 'no' }}"})),
    TokenizerFolder("byte order marks", _marked),
    TokenizerFolder("truncation and padding", _write(tokenizer=_cut)),
    TokenizerFolder("a begin before each text", _write(tokenizer=_begun)),
    TokenizerFolder("special tokens as text",
                    _write(fields=ROLES | {"split_special_tokens": True})),
    TokenizerFolder("qwen, its own pipeline",
                    _write(tokenizer=_qwen, fields=QWEN, config={"model_type": "qwen3"})),
    TokenizerFolder("qwen, another pipeline", _write(fields=QWEN, config={"model_type": "qwen3"})),
    TokenizerFolder("a generic class in a folder of qwen2", _write(config={"model_type": "qwen2"})),
    TokenizerFolder("llama, byte level", _write(fields=LLAMA, config={"model_type": "llama"})),
    TokenizerFolder("llama, metaspace",
                    _write(tokenizer=_metaspace, fields=LLAMA, config={"model_type": "llama"})),
    TokenizerFolder("no class", _write(fields=ROLES | {"tokenizer_class": None},
                                       config={"model_type": "llama"})),
    TokenizerFolder("an unknown class",
                    _write(fields=ROLES | {"tokenizer_class": "MineTokenizer"})),
    TokenizerFolder("phi3, which names llama's class",
                    _write(fields=LLAMA, config={"model_type": "phi3"})),
    TokenizerFolder("gpt2", _write(fields=ROLES | {"tokenizer_class": "GPT2Tokenizer"},
                                   config={"model_type": "gpt2"})),
    TokenizerFolder("code of its own",
                    _write(fields=ROLES | {"tokenizer_class": "Mine", "auto_map": OWN_CODE},
                           config={"model_type": "mine"}), "transformers cannot read"),
)  # fmt: skip
