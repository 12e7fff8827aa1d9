"""Whether a model that was given knows the tokens that its task speaks."""

from collections.abc import Mapping
from typing import Any

from rollstream.producers.tasks.base import Task
from rollstream.producers.tasks.text_tokenizer import TextTokenizer
from rollstream.config.settings import Configuration
from rollstream.storage.hf_folder import find_hf_folder, read_hf_config
from rollstream.errors import ConfigurationError


def check_vocabulary(configuration: Configuration, task: Task) -> None:
    """`ConfigurationError` when the model of `model.path` has fewer tokens than the task's
    tokenizer has words, or than its first prompt and its stop tokens use. Tokens added to a
    tokenizer without room in the model (padding, images) are nobody's mistake until they are used.
    """
    path = configuration.model.path
    if path is None:
        return  # the warm-up made it of the tokenizer's size
    fields = read_hf_config(find_hf_folder(path))
    text: Mapping[str, Any] = fields.get("text_config") or fields
    size = text.get("vocab_size")
    first = task.prompt(configuration.seed, 0).tokens
    largest = max(_vocabulary_size(task) - 1, *task.stop, *first)
    if isinstance(size, int) and largest >= size:
        raise ConfigurationError(
            f"model.path: {path!r} knows {size} tokens, and the tokenizer of task {task.name!r} "
            f"writes numbers up to {largest}: it is another model's; a task of text reads the "
            "model's own where task.tokenizer is not set"
        )


def _vocabulary_size(task: Task) -> int:
    tokenizer = task.tokenizer()
    if isinstance(tokenizer, TextTokenizer):
        return max(tokenizer.light.get_vocab(with_added_tokens=False).values(), default=-1) + 1
    return tokenizer.size
