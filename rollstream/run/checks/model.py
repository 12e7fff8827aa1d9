"""Checks that a starting model's files are complete and readable, as far as names, sizes and
headers tell. No tensor is read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigurationError
from rollstream.run.checks.findings import Finding
from rollstream.run.config.run_model import missing_model
from rollstream.run.config.settings import Configuration
from rollstream.storage.model_folder.hf_folder import (
    CONFIG,
    find_hf_folder,
    read_small_file,
    small_files,
)
from rollstream.storage.model_folder.hf_tokenizer import chat_template_of, check_tokenizer_files
from rollstream.storage.model_folder.hf_weights import (
    check_trainable,
    read_weight_files,
    unread_files,
    unused_line,
)
from rollstream.storage.model_folder.lora_folder import check_adapter


@dataclass(frozen=True, slots=True)
class ModelFacts:
    folder: Path
    fields: Mapping[str, Any]
    parameters: int
    bytes: int
    dtypes: tuple[str, ...]
    unread: tuple[str, ...]
    """Beside the model, read by no role."""

    @property
    def vocabulary(self) -> int | None:
        size = (self.fields.get("text_config") or self.fields).get("vocab_size")
        return size if isinstance(size, int) else None


def read_model_facts(c: Configuration, is_stored: bool = False) -> ModelFacts | None:
    """Returns None if `model.path` is not on this host. Raises `ConfigurationError` if a file is
    missing, cut off, or a pointer of Git LFS; the adapter may be missing if the run's store has the
    model (`is_stored`).
    """
    if c.model.path is None:
        return None
    folder = find_hf_folder(c.model.path)
    if not (folder / CONFIG).is_file():
        return None
    fields = check_trainable(folder)
    for path in small_files(folder).values():
        try:
            read_small_file(path)
        except (OSError, ConfigurationError) as error:
            raise ConfigurationError(f"model.path: {error}") from None
    try:
        check_tokenizer_files(folder)
    except ConfigurationError as error:
        raise ConfigurationError(f"model.path: {error}") from None
    if not c.has_model:
        return ModelFacts(folder, fields, 0, 0, (), ())
    adapter = c.model.lora.path
    if adapter is not None and not (is_stored and not Path(adapter).expanduser().exists()):
        check_adapter(c.model.lora)
    tensors = read_weight_files(folder)
    return ModelFacts(
        folder,
        fields,
        sum(tensor.numbers for tensor in tensors.values()),
        sum(path.stat().st_size for path in {tensor.path for tensor in tensors.values()}),
        tuple(sorted({tensor.dtype for tensor in tensors.values()})),
        tuple(unread_files(folder)),
    )


def model_findings(
    c: Configuration, facts: ModelFacts | None, is_stored: bool, is_made: bool
) -> Iterator[Finding]:
    """`is_stored`: the run has a model already; `is_made`: a warm-up makes one."""
    if not c.has_model:
        text = f"none: the learner {c.trainer.learner!r} trains no weights"
        yield Finding("model", "ok", text)
    elif facts is not None:
        dtypes = ", ".join(facts.dtypes)
        text = f"{facts.folder}: {_count(facts.parameters)} parameters, {dtypes}, complete"
        figures = {"parameters": facts.parameters, "dtype": dtypes, "bytes": facts.bytes}
        yield Finding("model", "ok", text, figures)
        if text := _other_template(c, facts.folder):
            yield Finding("template", "warning", text)
        if facts.unread:
            yield Finding("model", "warning", unused_line(facts.folder, facts.unread, "files"))
    elif is_stored:
        yield Finding("model", "ok", "the run has its model")
    elif is_made:
        text = f"new {c.model.architecture}, made by a warm-up of {c.warmup.steps} steps"
        yield Finding("model", "ok", text)
    else:
        yield Finding("model", "refused", str(missing_model(c)))


def _other_template(c: Configuration, base: Path) -> str:
    if c.model.lora.path is None or c.task.tokenizer is not None:
        return ""
    # An adapter may be trained with its own template, and the base's makes the prompts.
    adapter = Path(c.model.lora.path).expanduser()
    template = chat_template_of(adapter) if (adapter / "tokenizer.json").is_file() else None
    if template is None or template == chat_template_of(base):
        return ""
    return (
        f"{c.model.lora.path} (model.lora.path) has another chat template than {base}, which makes "
        f"the prompts: if the adapter was trained with its own, set task.tokenizer = "
        f"{c.model.lora.path!r}"
    )


def _count(parameters: int) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if parameters >= unit:
            return f"{parameters / unit:.2f} {name}"
    return f"{parameters:,}"
