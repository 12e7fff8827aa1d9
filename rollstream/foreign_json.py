"""Parses JSON of another program in time and memory proportional to the bytes. Depth is bounded:
the libraries raise `RecursionError` for deep nesting, and a value nested nearly so deep ends its
caller at a copy.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

# Most levels of lists and objects in each other; a model's configuration has fewer than ten.
DEPTH_MAX = 100
_T = TypeVar("_T")


def parse_json(data: bytes | str, type_: type[_T]) -> _T:
    """Raises ValueError if `data` is not strict JSON, not a value of the type, or nested too
    deeply.
    """
    # `rollstream --help` need not wait for it.
    import msgspec

    try:
        value = msgspec.json.decode(data, type=type_)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(data, value)
    return value


def parse_loose_json(
    data: bytes | str, make: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None
) -> Any:
    """Parses JSON with `NaN` and `Infinity`, as Python's library writes them; `make` makes each
    object of its pairs, else the last of a repeated name counts. Raises ValueError as `parse_json`
    does.
    """
    try:
        value = json.loads(data, object_pairs_hook=make)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(data, value)
    return value


def _check_depth(data: bytes | str, value: object) -> None:
    brackets = ("{", "[") if isinstance(data, str) else (b"{", b"[")
    # Text with few brackets cannot be deep, and need not be searched.
    if sum(map(cast(Any, data).count, brackets)) <= DEPTH_MAX:
        return
    level: list[object] = [value]
    for _ in range(DEPTH_MAX + 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += cast("dict[object, object]", item).values()
            elif isinstance(item, list):
                below += cast("list[object]", item)
        if not below:
            return
        level = below
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects are nested more than {DEPTH_MAX} deep")
