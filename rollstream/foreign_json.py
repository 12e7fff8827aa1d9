"""Parses JSON that another program wrote: whatever the bytes are, the result is a value or a
`ValueError`, in time and memory proportional to them.

The libraries raise further errors: `RecursionError` for nesting that is too deep. A value that is
nested nearly so deep parses, and then ends the caller that copies or writes it. So the depth of
untyped values has a bound here. Each caller turns the error into its own, which names the place.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

DEPTH_MAX = 100
"""Most levels of lists and objects in each other; a model's configuration has fewer than ten."""
_T = TypeVar("_T")


def parse_json(data: bytes | str, type_: type[_T]) -> _T:
    """Returns the value of this type in `data`. Raises ValueError if `data` is not strict JSON, not
    a value of the type, or nested too deeply.
    """
    import msgspec  # what `rollstream --help` need not wait for

    try:
        value = msgspec.json.decode(data, type=type_)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(data, value)
    return value


def parse_loose_json(
    data: bytes | str, make: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None
) -> Any:
    """Returns the value in `data`, which may have `NaN` and `Infinity`, as Python's library writes
    them; `make` makes each object of its pairs, otherwise the last of a repeated name counts.
    Raises ValueError as `parse_json` does.
    """
    try:
        value = json.loads(data, object_pairs_hook=make)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(data, value)
    return value


def _check_depth(data: bytes | str, value: object) -> None:
    """Raise ValueError if lists and dicts in `value` are nested too deeply. Text with few brackets
    cannot be deep, and need not be searched.
    """
    brackets = ("{", "[") if isinstance(data, str) else (b"{", b"[")
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
