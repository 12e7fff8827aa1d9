"""The parent of a fork, stored in the fork's own store; the report, `checkpoints show` and forks of
the fork read it (docs/reference/fork.md).
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
    """The part of the task's order that is still to be used: the groups in `again`, then all from
    `on` on.
    """

    again: tuple[int, ...] = ()
    """Groups below `on` that the parent admitted and did not finish."""
    on: int = 0

    def first(self) -> int:
        return min((*self.again, self.on))

    def __contains__(self, group: int) -> bool:
        return group >= self.on or group in self.again


@dataclass(frozen=True, slots=True)
class Parentage:
    """The run and checkpoint that a fork started from, and the settings that it changed (before,
    now).
    """

    run: str
    folder: str
    checkpoint: str
    step: int
    state_hash: str
    """Hash of masters and optimiser, as the parent's ledger has it for that step."""
    prompts: PromptsLeft
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])

    def __str__(self) -> str:
        return f"{self.run} at step {self.step}"


def read_parentage(store: ObjectStore) -> Parentage | None:
    """The parentage; None if the run is no fork."""
    try:
        return decode_json(store.get(PARENTAGE_KEY), Parentage, PARENTAGE_KEY)
    except ObjectMissing:
        return None


def write_parentage(store: ObjectStore, parentage: Parentage) -> None:
    """Store the parentage; idempotent. Raises `StoreError` if another one is stored."""
    create_idempotent(store, PARENTAGE_KEY, encode_json(parentage))


def prompts_left(
    had: PromptsLeft,
    following: int,
    opened: Collection[int],
    ended: Collection[int],
    later: Collection[int],
) -> PromptsLeft:
    """The parent's prompts whose groups had not ended at the checkpoint's step. Pure.

    `following` is the first group whose admission the trainer had not read; `opened` are the open
    groups below it, `ended` those from it on that had ended nevertheless, `later` those that the
    ledger ends in a later step.
    """
    done = set(ended) - set(later)
    on = max((following, had.on, *(group + 1 for group in done)))
    unread = {group for group in had.again if group >= following}
    unread |= set(range(max(following, had.on), on))
    left = ({*opened, *later} | unread) - done
    return PromptsLeft(tuple(sorted(g for g in left if g < on and g in had)), on)
