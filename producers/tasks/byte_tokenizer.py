"""The built-in tokenizer of text tasks: one token per byte, for models that start from scratch.

Nothing is downloaded and every text can be encoded: 0 to 255 are the bytes themselves, six special
tokens follow. Its chat template is ChatML with one token per role, because a byte-level model
spends a token on every letter of a template.
"""
# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SPECIAL = (PAD, BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>")
NAMES = {"pad_token": PAD, "bos_token": BEGIN, "eos_token": END}
"""The names in `tokenizer_config.json`."""

CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + message['role'] + ' is not system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 262 tokens. `<|begin|>` precedes an encoded text unless special tokens are
    disabled.
    """
    letters = _letters()
    made = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, byte_token(BEGIN))]
    )
    return made


def byte_token(special: str) -> int:
    """The number of a special token."""
    return 256 + SPECIAL.index(special)


def _letters() -> dict[int, str]:
    """The printable letter that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + place) for place, byte in enumerate(hidden)
    }
