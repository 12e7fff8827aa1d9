"""Damage for property tests: the changes of `testbed/hostile/damage.py` as Hypothesis draws them,
and the property that every parser has (`checked`).

A test has its full number of examples in `make fuzz` and `make test-slow`, elsewhere an eighth
(`examples`).
"""

import json
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import settings, strategies as st

from rollstream.errors import RollstreamError
from testbed.hostile import damage
from tests.support import shares

MEMORY_MAX = 64 << 20
"""Far above what any parser needs for the few kB that these tests give it."""
QUICK_SHARE, EXAMPLES_MIN = 8, 6
ODD = st.sampled_from(damage.ODD)
TAILS = damage.TAILS
RANDOM = st.randoms(use_true_random=False)
"""Choices that Hypothesis makes, and makes simple where a test fails."""
_T = TypeVar("_T")
Draw = Callable[[st.SearchStrategy[Any]], Any]
"""Draws from a strategy: of a composite strategy, or of a test's `data`."""


def examples(count: int) -> settings:
    """Returns the settings of a test with so many examples."""
    return shares.examples(count, QUICK_SHARE, least=EXAMPLES_MIN)


def checked(parse: Callable[[], _T]) -> _T | None:
    """Returns the value of a parser; None if it refuses its input by one of the project's errors.
    Any other exception fails the test, and so does memory above `MEMORY_MAX`.
    """
    tracemalloc.start()
    try:
        return parse()
    except RollstreamError:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_MAX, f"{peak:,} bytes"


def changed_json(draw: Draw, value: Any) -> Any:
    """Returns a copy of a JSON value in which a few parts are odd, missing, moved or added."""
    return damage.changed_json(draw(RANDOM), value)


def changed_bytes(draw: Draw, data: bytes) -> bytes:
    """Returns a copy of the bytes with a few of them flipped, cut out, doubled or replaced."""
    return damage.changed_bytes(draw(RANDOM), data)


@st.composite
def damaged_json(draw: st.DrawFn, samples: Sequence[bytes]) -> bytes:
    """The bytes of one of these JSON texts, damaged as values or as bytes."""
    return damage.damaged_json(draw(RANDOM), json.loads(draw(st.sampled_from(samples))))


@st.composite
def damaged_bytes(draw: st.DrawFn, samples: Sequence[bytes]) -> bytes:
    return changed_bytes(draw, draw(st.sampled_from(samples)))
