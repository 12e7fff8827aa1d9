"""Chooses the complete groups that a step trains first: pure functions of frozen values
(invariant 9).

A user's own rule is named by its import path, `module:function`, and has the signature of `oldest`.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from rollstream.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """A complete group and the smallest version number among its spans."""

    group: int
    oldest_version: int


GroupChoice = Callable[[Sequence[GroupCandidate], int], Sequence[int]]
"""(candidates, largest number of groups) → numbers of the chosen groups, in the order in which they
are trained.
"""


def oldest(candidates: Sequence[GroupCandidate], groups: int) -> Sequence[int]:
    """Smallest version first, then prompt number: no group waits longer than necessary, so lag
    stays small.
    """
    ordered = sorted(candidates, key=lambda c: (c.oldest_version, c.group))
    return [c.group for c in ordered[:groups]]


def freshest(candidates: Sequence[GroupCandidate], groups: int) -> Sequence[int]:
    """Largest version first, then prompt number; old groups wait until they expire."""
    ordered = sorted(candidates, key=lambda c: (-c.oldest_version, c.group))
    return [c.group for c in ordered[:groups]]


BUILT_IN: dict[str, GroupChoice] = {"oldest": oldest, "freshest": freshest}


def load_choice(name: str) -> GroupChoice:
    """The rule that the setting names; its choice is checked at each call.

    Raises `ConfigurationError` if the name cannot be imported or called.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigurationError(
            f"trainer.choose: {name!r} is neither of {', '.join(BUILT_IN)} nor 'module:function'"
        )
    try:
        found: object = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"trainer.choose: cannot import {function!r} from {module!r} ({error}); "
            "the module must be on PYTHONPATH of the trainer"
        ) from error
    if not callable(found):
        raise ConfigurationError(f"trainer.choose: {name!r} is not a function")
    return _checked(cast(Callable[..., Iterable[int]], found), name)


def _checked(rule: Callable[..., Iterable[int]], name: str) -> GroupChoice:
    def choose(candidates: Sequence[GroupCandidate], groups: int) -> Sequence[int]:
        chosen = list(rule(candidates, groups))
        offered = {c.group for c in candidates}
        if len(chosen) > groups or len(set(chosen)) < len(chosen) or not offered.issuperset(chosen):
            raise ConfigurationError(
                f"trainer.choose: {name!r} returned {chosen}; it must return at most {groups} "
                "different groups out of those offered"
            )
        return chosen

    return choose
