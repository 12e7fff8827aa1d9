"""Equality of records by value: their classes compare by identity, because of the arrays."""

import numpy as np

from rollstream.streams.records import Record


def differences(one: Record, other: Record) -> list[str]:
    """Names of the fields in which two records differ, in value or in an array's dtype."""
    if type(one) is not type(other):
        return [f"{type(one).__name__} is not {type(other).__name__}"]
    differing: list[str] = []
    for name in one.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
                differing.append(name)
        elif a != b or type(a) is not type(b):
            differing.append(name)
    return differing
