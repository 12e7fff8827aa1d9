"""Rewards that people's verifiers return: numbers of other libraries, and what is no number."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np

from rollstream.producers.rewards.foreign_number import NoFiniteNumber, finite_number
from testbed.first_hour.case import FirstHourCase


def _number(name: str, value: Callable[[], object], expected: float | None) -> FirstHourCase:
    """Returns the case of a reward; None: it is refused by its type or value."""

    def fault(_: Path) -> str:
        given = value()
        try:
            number = finite_number(given, "the reward")
        except NoFiniteNumber as error:
            known = str(error).startswith("the reward is")
            return "" if expected is None and known else f"{given!r}: {error}"
        return "" if number == expected else f"{given!r} became {number}"

    return FirstHourCase(name, "a reward of another library", fault)


def _tensor(value: object) -> object:
    import torch

    return torch.tensor(value)


CASES = (
    _number("numpy_bool", lambda: np.bool_(True), 1.0),
    _number("numpy_float32", lambda: np.float32(0.5), 0.5),
    _number("numpy_without_dimensions", lambda: np.array(2), 2.0),
    _number("decimal", lambda: Decimal("0.25"), 0.25),
    _number("fraction", lambda: Fraction(1, 4), 0.25),
    _number("python_bool", lambda: True, 1.0),
    FirstHourCase(
        "tensor",
        "a reward of another library",
        _number("", lambda: _tensor(0.5), 0.5).fault,
        is_slow=True,
    ),
    _number("text", lambda: "1.0", None),
    _number("numpy_text", lambda: np.str_("1.0"), None),
    _number("nothing", lambda: None, None),
    _number("complex", lambda: np.complex128(1), None),
    _number("nan", lambda: np.float64("nan"), None),
    _number("infinite_decimal", lambda: Decimal("Infinity"), None),
    _number("signalling_nan", lambda: Decimal("sNaN"), None),
    _number("huge", lambda: 10**400, None),
    _number("several", lambda: np.array([1.0, 0.0]), None),
)
