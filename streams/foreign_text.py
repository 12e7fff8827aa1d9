"""Cleans foreign text and JSON for records: halves of surrogate pairs from JavaScript programs that
cut a text, `NaN`, nesting deeper than a stack, numbers of thousands of digits.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, cast

DEPTH_MAX = 128
"""A JSON schema takes two levels for each nested object; encoders and chat templates need a few
frames a level, of Python's 1 000.
"""
PORT_MAX = 65535
DIGITS_MAX = 300  # of a whole number: those of the largest float
_INTEGER_MAX = 10**DIGITS_MAX
_REASON_MAX = 300  # characters
_WHOLE = re.compile("[0-9]{1,18}")


class ForeignValueRefused(ValueError):
    """Raised for JSON that no record can hold; the message states why."""


def joined_parts(parts: Sequence[object]) -> str:
    """Returns texts, or objects with a `text`, in OpenAI's protocol. Raises `ForeignValueRefused`,
    which names the type, for another part.
    """
    texts: list[str] = []
    for part in parts:
        fields = cast(dict[str, object], part) if isinstance(part, dict) else {"text": part}
        text = fields.get("text")
        if not isinstance(text, str):
            kind = reason_text(fields.get("type", type(cast(object, part)).__name__), 40)
            raise ForeignValueRefused(
                f"a part of a message is not text but {kind!r}; images and audio are not served"
            )
        texts.append(text)
    return "".join(texts)


def clean_text(text: str) -> str:
    """Returns the text with U+FFFD for each unpaired half of a surrogate pair; two halves in order
    become their character.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def whole_number(text: str) -> int | None:
    """Returns a number of at most 18 digits; None for any other text."""
    # `isdigit` takes signs such as `²`, which `int` refuses, and `int` refuses 5 000 digits.
    return int(text) if _WHOLE.fullmatch(text) else None


def reason_text(reason: object, characters_max: int = _REASON_MAX) -> str:
    """Returns a program's reason, or an exception, as clean text."""
    try:
        text = reason if isinstance(reason, str) else str(reason)
    except Exception:  # noqa: BLE001 (code of others: the reason stays without its text)
        text = f"a {type(reason).__name__} without a text"
    return clean_text(text[:characters_max])


def clean_json(value: object, depth_max: int = DEPTH_MAX) -> Any:
    """Returns the value with clean texts."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if not -_INTEGER_MAX < value < _INTEGER_MAX:
            raise ForeignValueRefused(f"a number of more than {DIGITS_MAX} digits")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ForeignValueRefused(f"{value} is not JSON")
        return value
    if depth_max < 1:
        raise ForeignValueRefused("it is nested too deep")
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return {clean_text(str(name)): clean_json(item, depth_max - 1) for name, item in items}
    if isinstance(value, list | tuple):
        return [clean_json(item, depth_max - 1) for item in cast("list[object]", value)]
    raise ForeignValueRefused(f"a {type(value).__name__} is not JSON")


def read_json(data: str | bytes | bytearray) -> Any:
    """Returns the value as `clean_json`; raises `ForeignValueRefused` for text that is not JSON,
    too.
    """
    try:
        return clean_json(json.loads(data))
    except ForeignValueRefused:
        raise
    except RecursionError:
        raise ForeignValueRefused("it is nested too deep") from None
    except ValueError as error:
        raise ForeignValueRefused(f"not JSON: {reason_text(error)}") from None
