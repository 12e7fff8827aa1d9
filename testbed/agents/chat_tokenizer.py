"""Writes tokenizers with chats like those of published models, without their files."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rollstream.producers.dialogue.text_tokenizer import TextTokenizer, byte_tokenizer

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
         "<|image_pad|>", "<|video_pad|>")  # fmt: skip
WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
         "</think>")  # fmt: skip

THINKING = (
    "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    "{% for message in messages %}{% set text = message['content'].split('</think>')[-1] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + text.strip() + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""A template that begins a thought in each prompt and leaves it out of earlier answers."""


def chatml_tokenizer(folder: Path, template: str, words: Sequence[str] = WORDS) -> TextTokenizer:
    """Saves a tokenizer of bytes and the tokens of ChatML, with this chat template."""
    made = byte_tokenizer()
    made.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])  # pyright: ignore[reportUnknownMemberType]
    made.add_tokens([AddedToken(word, normalized=False) for word in words])  # pyright: ignore[reportUnknownMemberType]
    whole = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    whole.chat_template = template
    whole.save_pretrained(str(folder))  # pyright: ignore[reportUnknownMemberType]
    return TextTokenizer(folder)
