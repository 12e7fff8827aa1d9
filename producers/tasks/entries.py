"""Converts entries of procedural data sets to JSON and back without loss: tuples and key types are
kept.

Some scoring functions compare tuples, and some data sets differ between two processes with the same
seed (they iterate over sets of strings). A reward must therefore get the very entry of the prompt.
"""

from fractions import Fraction
from typing import Any, cast

from rollstream.errors import ConfigurationError

_TUPLE, _PAIRS, _FRACTION = "$tuple", "$pairs", "$fraction"


def pack(value: Any) -> Any:
    """JSON of an entry. Raises `ConfigurationError` for a value of an unsupported type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(one) for one in cast(list[Any], value)]
    if isinstance(value, tuple):
        return {_TUPLE: [pack(one) for one in cast(tuple[Any, ...], value)]}
    if isinstance(value, dict):
        pairs = cast(dict[Any, Any], value)
        if all(isinstance(key, str) and not key.startswith("$") for key in pairs):
            return {key: pack(one) for key, one in pairs.items()}
        return {_PAIRS: [[pack(key), pack(one)] for key, one in pairs.items()]}
    if isinstance(value, Fraction):
        return {_FRACTION: str(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist())
    raise ConfigurationError(
        f"an entry of this data set holds a {type(value).__name__}, which cannot travel to the "
        "reward; choose another data set, or write a task of your own around it"
    )


def unpack(value: Any) -> Any:
    """The entry that was packed."""
    if isinstance(value, list):
        return [unpack(one) for one in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    table = cast(dict[str, Any], value)
    if _TUPLE in table:
        return tuple(unpack(one) for one in table[_TUPLE])
    if _PAIRS in table:
        return {unpack(key): unpack(one) for key, one in table[_PAIRS]}
    if _FRACTION in table:
        return Fraction(table[_FRACTION])
    return {key: unpack(one) for key, one in table.items()}
