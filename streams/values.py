"""Defines the values inside records: array types, and small frozen structs that are compared by
value. Also defines `RecordStruct`, the base of all records.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, dataclass_transform

import msgspec
import numpy as np
from msgspec import field
from numpy.typing import NDArray

if TYPE_CHECKING:
    Tokens = NDArray[np.uint32]
    Sources = NDArray[np.uint8]
    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]
else:
    # An array field of a record's JSON header holds the number of items. The bound keeps
    # count * item size far from overflow; the record's length is the actual limit.
    Tokens = Sources = Floats = Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


@dataclass_transform(frozen_default=True, order_default=True)
class _Value(msgspec.Struct, frozen=True, order=True, gc=False):
    """A struct compared by value; `gc=False` is safe, because its fields cannot form a cycle."""


class Version(_Value):
    """Weights of a run: the number of steps behind them, and the term of the trainer that published
    them.
    """

    number: int
    term: int

    def __str__(self) -> str:
        return f"v{self.number:08d}-t{self.term:04d}"


class Span(_Value):
    """Generated tokens `[start, end)` were emitted under `version`. Indices count only the
    generated tokens of a trajectory (0 is the first of them), so its spans tile
    `[0, len(logprobs))` exactly (invariant 3).
    """

    start: int
    end: int
    version: Version


class Address(_Value):
    """The place of one record in its topic."""

    partition: int
    offset: int


class Fence(_Value):
    """The highest term whose `Opened` was read, and the sequence number that its next record has.
    `presumed`: no `Opened` was read yet, because the reader began after it (`fence.py`).
    """

    term: int = 0
    sequence: int = 0
    presumed: bool = False


class Position(_Value):
    """The next offset to read in one partition, and the fence there. In topics of many writers the
    fence stays empty.
    """

    offset: int = 0
    fence: Fence = Fence()


class Branch(_Value):
    """A place where the tokens of an episode do not continue the token before. They are flat, turn
    after turn; from index `start` on they continue the path that ends with the token at index `at`
    (-1: they begin a path of their own). The tokens before the first branch are one path.
    """

    start: int
    at: int


class Turn(_Value):
    """One answered request of the program that runs an episode. Its prompt added the tokens
    `[start, generated)`, the model generated `[generated, end)` (flat indices), and it ended by
    `finish`: stop, length or tool_calls.

    `digest` names the request: an equal one gets the stored `answer` (JSON; only in partials).
    `history` is the hash of all messages up to and with the answer, by which the next request finds
    its place. The program took `waiting_s` seconds since its previous answer (0 while another turn
    was generated), the answer took `generating_s`. `fork` is the cause if the turn continued none
    or continued one that another turn continued before: template, retokenised, history_rewritten or
    conversation. `overridden` names parameters that the client asked to
    differ from the run's sampling.
    """

    digest: str
    history: str
    start: int
    generated: int
    end: int
    finish: str
    waiting_s: float
    generating_s: float
    fork: str = ""
    overridden: tuple[str, ...] = ()
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of sampling; `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    tokens_max: int = 256
    stop: tuple[int, ...] = ()


class Drafts(_Value):
    """Draft statistics of consecutive generated tokens. `runs` are lengths of alternating kinds:
    tokens that the model sampled itself (perhaps 0), accepted draft tokens, sampled ones, and so
    on. The model generated the tokens in `steps` passes. `asked` look-ups took `lookup_s` seconds;
    `found` of them gave a draft, with `guessed` draft tokens in all.
    """

    runs: tuple[int, ...]
    steps: int
    guessed: int
    asked: int
    found: int
    lookup_s: float


class Member(_Value):
    """One trajectory record: its address and the xxh3-64 of its bytes (hex)."""

    trajectory: str
    at: Address
    hash: str


class AnnotationUsed(_Value):
    """One annotation record that a step used."""

    trajectory: str
    name: str
    at: Address
    hash: str


class GroupMembers(_Value):
    """All completions of a group, dead ones included, fixed by the group's first `Take`."""

    group: int
    members: tuple[Member, ...]


class TokenRange(_Value):
    """Tokens `[start, end)` of a trajectory, by their indices among all its tokens."""

    start: int
    end: int


class ArrayHead(_Value):
    """One named array of a trajectory's tokens: a row of `dtype` and `shape` for each token of
    `ranges`, which ascend. Its rows are the next `bytes` bytes of `array_bytes`, compressed
    (`token_arrays.py`).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[TokenRange, ...]
    bytes: int


class SettingsSince(_Value):
    """The prompts from `group` on are made under the configuration with this hash, until a higher
    group is named; `group` is 0 in a run whose settings never changed.
    """

    group: int
    configuration_hash: str


class ReadTo(_Value):
    """The positions to which a topic was read: the next offset of each partition, from partition 0
    on.
    """

    topic: str
    offsets: tuple[int, ...]


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
# Roles create and read thousands: msgspec builds a struct straight from JSON, in a tenth of the
# time of a frozen dataclass.
class RecordStruct(
    msgspec.Struct, frozen=True, eq=False, gc=False, omit_defaults=True, tag_field="schema"
):
    """Base of all records, compared by identity because of their arrays. The tag is the schema name
    with its version.

    Array fields are NumPy arrays of the dtype in their annotation; their names in the header carry
    the NumPy kind and item size (`tokens:u4`). All other fields are in the record's one JSON header
    (`codec.py`) under their own names. New fields come last and need defaults; unknown fields are
    ignored. A new array without default, or any breaking change, is a new schema name.
    """

    @classmethod
    def schema(cls) -> str:
        return str(cls.__struct_config__.tag)


def accepted_tokens(drafts: Drafts) -> int:
    """Returns the number of draft tokens that the model accepted."""
    return sum(drafts.runs[1::2])


def accepted_mask(drafts: Drafts | None, count: int) -> NDArray[np.bool_]:
    """Returns a mask [count], true at accepted draft tokens. Runs beyond `count` are cut off."""
    mask = np.zeros(count, np.bool_)
    at = 0
    for index, length in enumerate(() if drafts is None else drafts.runs):
        mask[at : at + length] = index % 2 == 1
        at += length
    return mask


def join_drafts(parts: Iterable[tuple[int, Drafts | None]]) -> Drafts | None:
    """Returns the drafts of consecutive parts of a trajectory as one; None if no part has any. A
    part is its number of generated tokens and its drafts; tokens of a part without drafts count as
    sampled by the model itself, one per step.
    """
    drafted_parts = list(parts)
    if all(drafts is None for _, drafts in drafted_parts):
        return None
    runs = [0]
    all_drafts = [
        drafts or Drafts((count,), count, 0, 0, 0, 0.0) for count, drafts in drafted_parts
    ]
    for drafts in all_drafts:
        for index, length in enumerate(drafts.runs):
            extend_runs(runs, length, guessed=index % 2 == 1)
    return Drafts(
        tuple(runs),
        sum(drafts.steps for drafts in all_drafts),
        sum(drafts.guessed for drafts in all_drafts),
        sum(drafts.asked for drafts in all_drafts),
        sum(drafts.found for drafts in all_drafts),
        sum(drafts.lookup_s for drafts in all_drafts),
    )


def split_off_last(drafts: Drafts | None) -> tuple[Drafts | None, Drafts | None]:
    """Returns the drafts of a part without its newest token, with all counts, and those of this
    token alone.
    """
    if drafts is None:
        return None, None
    runs, is_accepted = list(drafts.runs), len(drafts.runs) % 2 == 0
    runs[-1] -= 1
    if not runs[-1] and len(runs) > 1:
        runs.pop()
    rest = Drafts(
        tuple(runs), drafts.steps, drafts.guessed, drafts.asked, drafts.found, drafts.lookup_s
    )
    return rest, Drafts((0, 1) if is_accepted else (1,), 0, 0, 0, 0, 0.0)


def extend_runs(runs: list[int], length: int, *, guessed: bool) -> None:
    """Append a run of `length` tokens; adjacent runs of one kind become one. `guessed` tokens are
    accepted draft tokens, others the model sampled itself.
    """
    assert runs, "runs begin with the tokens before the first draft, perhaps 0"
    if len(runs) % 2 == (not guessed):
        runs[-1] += length
    elif length:
        runs.append(length)
