"""The numbers that a user's code returns, those of numpy and torch without importing these."""

import math
from decimal import Decimal
from numbers import Real
from typing import Any, cast


class NoFiniteNumber(ValueError):
    """Raised for a value that is no finite real number; the message names it."""


def finite_number(value: object, name: str) -> float:
    """Returns any real number of Python, or a value of numpy or torch without dimensions. Raises
    `NoFiniteNumber`, which begins with `name`, for everything else.
    """
    shape: Any = getattr(value, "shape", None)
    kind = type(value).__name__
    if shape is not None and callable(getattr(value, "item", None)):
        if len(shape):
            raise NoFiniteNumber(f"{name} is a {kind} of shape {tuple(shape)}, not a number")
        value = cast(Any, value).item()
    if not isinstance(value, Real | Decimal):
        raise NoFiniteNumber(f"{name} is a {kind}, not a number")
    try:
        number = float(value)
    except (OverflowError, ValueError):  # ValueError: of a signalling NaN
        raise NoFiniteNumber(f"{name} is a {kind} that is no finite number") from None
    if not math.isfinite(number):
        raise NoFiniteNumber(f"{name} is {number}")
    return number
