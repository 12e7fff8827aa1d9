"""Defines the records of the ledger. They state with which configuration each term of the trainer
ran, which trajectories it trained and which it gave up. `records.py` exports them with all others.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from rollstream.streams.values import (
    AnnotationUsed,
    GroupMembers,
    Member,
    ReadTo,
    RecordStruct,
    SettingsSince,
    Version,
)


class Configured(RecordStruct, tag="configured/1"):
    """What a term of the trainer runs with: hash of the essential settings (`config.fingerprint`)
    and revision of the code. The term starts after step `resumed_from`. `accepted` is True if the
    settings differ from those of the term before and `--accept-config` allowed the change.
    """

    configuration_hash: str
    code_revision: str
    resumed_from: int
    accepted: bool = False
    forked_from: str = ""
    """Run and checkpoint that the first term of a fork started from."""
    run_id: str = ""
    """The id that was drawn when the run was created; empty in terms of the first release."""


class Take(RecordStruct, tag="take/1"):
    """One micro-batch of a step: it trains exactly these trajectories, in this order.

    A group named in a take is trained, unless the take is superseded. `groups` lists all members of
    each group whose first take this is; `annotations` are those of these members. `read` and
    `believed` are what the trainer had read when it chose these groups: the positions in
    `trajectories` and `annotations`, and the highest believed version. Every record of these groups
    below the positions is named here, unless an earlier record counted in its place. A take that
    begins no group has neither `read` nor `believed`. `settings` are those of its groups' prompts,
    as far as the run's settings changed before them.
    """

    step: int
    update: int
    micro_batch: int
    members: tuple[Member, ...]
    groups: tuple[GroupMembers, ...]
    annotations: tuple[AnnotationUsed, ...] = ()
    read: tuple[ReadTo, ...] = ()
    believed: Version | None = None
    settings: tuple[SettingsSince, ...] = ()


class TakeRetried(RecordStruct, tag="take_retried/1"):
    """The trainer computes a take again that an earlier term left in an unfinished step. If a new
    term's start follows this record directly, the trainer ended within that take. A record without
    `micro_batch` follows the last of these takes: all of them are computed.
    """

    step: int
    update: int
    micro_batch: int | None


class TakeFailed(RecordStruct, tag="take_failed/1"):
    """The learner raised `error` on these micro-batches of an update (several if they were computed
    together and the failing one is unknown); the trainer ends. `out_of_memory`: memory was too
    short for them, so smaller ones may succeed.
    """

    step: int
    update: int
    micro_batches: tuple[int, ...]
    error: str
    out_of_memory: bool = False


class Superseded(RecordStruct, tag="superseded/1"):
    """The learner cannot compute these micro-batches: no term trains them.

    The groups in `poisoned` end dead. Other groups that begin in one of these micro-batches stay
    open, and later takes of the same update train their members.
    """

    step: int
    update: int
    micro_batches: tuple[int, ...]
    poisoned: tuple[int, ...]
    detail: str


class TakesRepeated(RecordStruct, tag="takes_repeated/1"):
    """The trainer trains an update's takes once more, for a further update of the optimiser: its
    `epoch` counted from 0, which is their first training. `micro_batches` are their numbers, in the
    order of training; superseded takes are not among them.
    """

    step: int
    update: int
    epoch: int
    micro_batches: tuple[int, ...]


StateHashes = tuple[str, str]
"""Those of a `StepDone`: `state_hash` and `weights_hash`."""


def is_same_state(first: StateHashes, second: StateHashes) -> bool:
    """Returns whether both state the same bits. The hashes of the state decide if both have one,
    else those of the published tensors; False if they have neither in common.
    """
    if first[0] and second[0]:
        return first[0] == second[0]
    return first[1] != "" and first[1] == second[1]


def first_difference(runs: Sequence[Mapping[int, StateHashes]]) -> int | None:
    """Returns the first step that all runs have and that not all end in the same state; None if
    there is none.
    """
    common = sorted(set(runs[0]).intersection(*runs[1:])) if runs else []
    differing = (
        step for step in common if not all(is_same_state(runs[0][step], run[step]) for run in runs)
    )
    return next(differing, None)


class StepDone(RecordStruct, tag="step_done/1"):
    """A version is complete. `state_hash` covers the trainer's fp32 weights (masters) and its
    optimiser; `metrics` and `counts` are those of this step.

    A state above 1 GB is hashed only where a checkpoint is written: elsewhere `state_hash` is "".
    Every step of such a run has `weights_hash`, which covers the published tensors.
    """

    step: int
    version: Version
    state_hash: str
    takes: int
    metrics: dict[str, float]
    counts: dict[str, int]
    time_s: float
    weights_hash: str = ""

    def has_same_state(self, other: "StepDone") -> bool:
        """Whether both records state the same bits (`is_same_state`)."""
        return is_same_state(self.hashes, other.hashes)

    @property
    def hashes(self) -> StateHashes:
        return self.state_hash, self.weights_hash


class GroupClosed(RecordStruct, tag="group_closed/1"):
    """A group ends without being trained (trained groups are named by their takes)."""

    group: int
    reason: Literal["filtered", "expired", "dead"]
    detail: str
    step: int
