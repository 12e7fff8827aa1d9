"""How much of what costs many seconds is in `make test`; `make test-slow` has the rest."""

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def one_of(every: int, values: Iterable[Any]) -> list[Any]:
    """Returns parameters of a test: each `every`-th value is fast, the others are marked slow."""
    return [
        pytest.param(value, marks=() if place % every == 0 else pytest.mark.slow)
        for place, value in enumerate(values)
    ]


def examples(count: int, share: int, steps: int = 50, least: int = 1) -> settings:
    """Returns the settings of a property test or state machine: `count` examples, of which
    `make test` draws one in `share`, at least `least`.
    """
    is_quick = os.environ.get("HYPOTHESIS_PROFILE", "repeatable") == "repeatable"
    number = max(count // share, least) if is_quick else count
    return settings(max_examples=number, stateful_step_count=steps, deadline=None)


def one_of_pairs(firsts: Iterable[Any], seconds: Iterable[Any]) -> list[Any]:
    """Returns all pairs as parameters of a test. A third of them is fast, with each first and each
    second value in some.
    """
    others = list(seconds)
    return [
        pytest.param(first, second, marks=() if (row + column) % 3 == 0 else pytest.mark.slow)
        for row, first in enumerate(firsts)
        for column, second in enumerate(others)
    ]
