"""Damage for fuzzing: valid values, texts and bytes, changed as a hostile writer would change them.
Every choice is one of `Random`, which is seeded (benchmarks) or Hypothesis's own (tests).
"""

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from random import Random
from typing import Any, cast

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 1 << 31, 1 << 53, 1 << 63, 1 << 64, -(1 << 70), 10**400,
    0.5, -0.0, 1e308, 5e-324, "", "x", "..", "../../x", "/etc/x", "a/b", "\x00", "\x1b[2J",
    "é", "\U0001f4a5", "\ud83d", "v99999999-t9999", "F32", "F4", "9" * 5000, [], {}, [[]], [None],
    {"a": None}, [0, -1, 1 << 60], ["x"] * 50,
)  # fmt: skip
"""Values in place of a field's own."""
TAILS = (
    b"", b"\x00", b"\xff", b"]", b"}", b'"', b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"NaN",
    b'"\\ud800"', b"\xed\xa0\x80", b"1e999", b"-", b"\xef\xbb\xbf",
)  # fmt: skip
PIECES = (
    "[", "]", "@", ":", "//", "?", "&", "=", "%", "%00", "#", "\u2100", "9" * 5000, "\udcff", "nan",
    "inf", "-1", "1e999", "\x00", "\u0661", "²", "é", ",", "://", "..", "http://[::1", ".", "!=",
    "<", "~", "null", "\n", " ", "x", "1_0", "'", '"', "a." * 400, "-99:99", "+00:00:00.1",
)  # fmt: skip
"""Texts that are put into others."""


def changed_json(drawn: Random, value: Any) -> Any:
    """Returns a copy of a JSON value in which a few parts are odd, missing, moved or added."""
    value = json.loads(json.dumps(value))
    for _ in range(drawn.randint(1, 3)):
        path = drawn.choice(list(_places(value)))
        if not path:
            if drawn.randrange(10) == 0:
                value = deepcopy(drawn.choice(ODD))
            continue
        inside: Any = value
        for part in path[:-1]:
            inside = inside[part]
        match drawn.choice(("odd", "odd", "odd", "missing", "other", "twice")):
            case "odd":
                inside[path[-1]] = deepcopy(drawn.choice(ODD))
            case "missing":
                del inside[path[-1]]
            case "other":
                inside[path[-1]] = json.loads(json.dumps(value))
            case _ if isinstance(inside, list):
                cast("list[Any]", inside).append(inside[path[-1]])
            case _:
                inside[drawn.choice(("", "format", "x", "../x"))] = inside[path[-1]]
    return value


def changed_bytes(drawn: Random, data: bytes) -> bytes:
    """Returns a copy of the bytes with a few of them flipped, cut out, doubled or replaced."""
    changed = bytearray(data)
    for _ in range(drawn.randint(1, 4)):
        at = drawn.randint(0, len(changed))
        match drawn.choice(("flip", "flip", "cut", "end", "insert", "copy")):
            case "flip" if at < len(changed):
                changed[at] ^= 1 << drawn.randint(0, 7)
            case "cut":
                del changed[at : at + drawn.randint(1, 40)]
            case "end":
                del changed[at:]
            case "copy":
                changed[at:at] = changed[: drawn.randint(0, 64)]
            case _ if drawn.randrange(2):
                changed[at:at] = drawn.choice(TAILS)
            case _:
                changed[at:at] = bytes(drawn.randrange(256) for _ in range(drawn.randint(0, 12)))
    return bytes(changed)


def changed_text(drawn: Random, text: str, pieces: Sequence[str] = PIECES) -> str:
    """Returns the text with up to three pieces put in, each in place of up to three characters."""
    for _ in range(drawn.choice((0, 1, 1, 1, 2, 3))):
        at = drawn.randint(0, len(text))
        text = text[:at] + drawn.choice(pieces) + text[at + drawn.randint(0, 3) :]
    return text


def damaged_json(drawn: Random, value: Any) -> bytes:
    """Returns the JSON text of a value, damaged as a value or, in one of four cases, as bytes."""
    if drawn.randrange(4):
        return json.dumps(changed_json(drawn, value)).encode()
    return changed_bytes(drawn, json.dumps(value).encode())


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every part of a JSON value."""
    yield path
    if isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            yield from _places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _places(item, (*path, index))
