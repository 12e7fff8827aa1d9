"""Where a fork comes from, kept in its own store: the report, `checkpoints show` and a fork of the
fork read it there (docs/fork.md).
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from rollstream.errors import ObjectMissing
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import create_idempotent, decode_json, encode_json

PARENTAGE_KEY = "forked_from.json"


@dataclass(frozen=True, slots=True)
class PromptsLeft:
    """What of the task's order is still to be asked: these, then all from `on` on."""

    again: tuple[int, ...] = ()
    """Below `on`; others asked for them, and their groups were not finished."""
    on: int = 0

    def first(self) -> int:
        return min((*self.again, self.on))

    def __contains__(self, group: int) -> bool:
        return group >= self.on or group in self.again


@dataclass(frozen=True, slots=True)
class Parentage:
    """The run and the checkpoint that a fork began from, and what it changed (before, now)."""

    run: str
    folder: str
    checkpoint: str
    step: int
    state_hash: str
    """Of masters and optimiser, as the parent's ledger has it of that step."""
    prompts: PromptsLeft
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])

    def __str__(self) -> str:
        return f"{self.run} at step {self.step}"


def read_parentage(store: ObjectStore) -> Parentage | None:
    """None for a run that is no fork."""
    try:
        return decode_json(store.get(PARENTAGE_KEY), Parentage, PARENTAGE_KEY)
    except ObjectMissing:
        return None


def write_parentage(store: ObjectStore, parentage: Parentage) -> None:
    """Once; another one under the same key is a `StoreError`."""
    create_idempotent(store, PARENTAGE_KEY, encode_json(parentage))


def prompts_left(
    had: PromptsLeft,
    following: int,
    opened: Collection[int],
    ended: Collection[int],
    later: Collection[int],
) -> PromptsLeft:
    """Of the parent's prompts, those whose groups had not ended at the checkpoint's step. Pure.

    `following` is the first group whose admission the trainer had not read; `opened` are the open
    ones below it, `ended` those from there on that had ended all the same, `later` those that the
    ledger ends in a later step.
    """
    done = set(ended) - set(later)
    on = max((following, had.on, *(group + 1 for group in done)))
    unread = {group for group in had.again if group >= following}
    unread |= set(range(max(following, had.on), on))
    left = ({*opened, *later} | unread) - done
    return PromptsLeft(tuple(sorted(g for g in left if g < on and g in had)), on)
