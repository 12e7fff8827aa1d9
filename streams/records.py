"""Defines every record of the log, one frozen msgspec struct each (`RecordStruct` has the rules).
The values inside them are defined in `values.py` and can be imported from here. The docstrings of
the records are the text of `docs/reference/records.md`.
"""

from typing import Literal, get_args

from msgspec import field

from rollstream.streams.ledger_records import (
    Configured as Configured,
    GroupClosed as GroupClosed,
    StepDone as StepDone,
    Superseded as Superseded,
    Take as Take,
    TakeFailed as TakeFailed,
    TakeRetried as TakeRetried,
)
from rollstream.streams.values import (
    Address,
    Bytes,
    Drafts,
    Fence as Fence,
    Floats,
    Position as Position,
    RecordStruct,
    Sampling,
    Sources,
    Span,
    Tokens,
    Version,
)

PROMPT, GENERATED, ENVIRONMENT = 0, 1, 2  # values of `sources`: where a token came from


class Opened(RecordStruct, tag="opened/1"):
    """First record of a term, in every partition of a single-holder role's topic: records of lower
    terms after it are void.

    `release` is the writer's release. `needs` are the features without which a reader would misread
    what this term writes in the topic. `knows` are all features that the writer knows beyond those
    of the first release (`release.py`). All three are empty if the writer is of the first release.
    """

    role: str
    term: int
    release: str = ""
    needs: tuple[str, ...] = ()
    knows: tuple[str, ...] = ()


class Prompt(RecordStruct, tag="prompt/1"):
    """One prompt of the seeded order; `group` is its index in that order. `reference` is the task's
    own JSON for the reward.
    """

    group: int
    task: str
    tokens: Tokens = field(name="tokens:u4")
    samples: int
    sampling: Sampling
    seed: int
    reference: str = ""
    epoch: int = 0


class Admitted(RecordStruct, tag="admitted/1"):
    """A group may be generated now. It belongs to `wave` and is trained at most `deadline_s` after
    its admission.
    """

    group: int
    wave: int
    trajectories: tuple[str, ...]
    deadline_s: float
    prompt: Address


class Assignment(RecordStruct, tag="assignment/1"):
    """Dispatch's order that a rollout (of this term) starts, resumes or releases a trajectory.

    `start` and `resume` carry all that generation needs. `version` is the version that the rollout
    must hold: for a start at least this number; for a resume under `keep_version` exactly this
    version. `partial` is the newest partial of the chain to resume from; None starts from the
    prompt. `first` is the oldest partial of the trajectory: the chain is read forward from there.

    `onward` of a release names the rollout that will resume the trajectory, so its tokens are kept
    as a last partial; empty: the trajectory is no longer needed. `predicted` is the expected number
    of generated tokens in all, 0 if unknown. `from_history`: no rollout holds `version` any more,
    so this empty rollout first loads it from the store.
    """

    kind: Literal["start", "resume", "release"]
    trajectory: str
    group: int
    index: int
    attempt: int
    rollout: str
    rollout_term: int
    version: Version
    task: str
    tokens: Tokens = field(name="tokens:u4")
    sampling: Sampling
    seed: int
    reference: str = ""
    partial: Address | None = None
    moves: int = 0
    wave: int = 0
    onward: str = ""
    predicted: int = 0
    from_history: bool = False
    first: Address | None = None


class Partial(RecordStruct, tag="partial/1"):
    """The tokens that a trajectory gained since the partial `previous`. `start` is the index of the
    first of them among all tokens of the trajectory; `spans` count only the generated ones. `last`:
    the rollout gave the trajectory up, so another may resume it at once. `sources` is empty if all
    of `tokens` were generated. `drafts` covers the tokens generated since `previous`; None: nothing
    was drafted, or the engine reports no drafts.
    """

    trajectory: str
    group: int
    attempt: int
    rollout: str
    rollout_term: int
    previous: Address | None
    start: int
    tokens: Tokens = field(name="tokens:u4")
    sources: Sources = field(name="sources:u1")
    logprobs: Floats = field(name="logprobs:f4")
    spans: tuple[Span, ...]
    environment: str = ""
    last: bool = False
    drafts: Drafts | None = None


class RolloutStatus(RecordStruct, tag="rollout_status/1"):
    """The present state of a rollout. Key: rollout and term.

    `health` is `leaving` for a rollout that accepts no more work. `busy_s` is CPU time in prefill
    and decode, `idle_s` time with nothing to decode. `kv_previous` is `kv_used` at the previous
    report. `decode_batch_max` is B_max, the batch size at which another row is no longer nearly
    free in a decode step. `pulling`: the rollout changes to other weights as soon as they have
    arrived. `queued`: those of the `waiting` that were not submitted to the engine yet.
    `preemptible`: the machine may be taken away at any moment. `stalled_s`: seconds since the last
    turn of the rollout's loop, set when a heartbeat thread sends this status; the other fields are
    then those of that last turn. `versions`: all versions that the rollout serves side by side, if
    there are others than `version`, the newest.
    """

    rollout: str
    term: int
    slots: int
    running: int
    waiting: int
    kv_used: int
    kv_capacity: int
    version: Version
    verified: bool
    health: Literal["starting", "generating", "draining", "pulling", "leaving"]
    quota_left: int
    tokens_per_s: float
    tokens_total: int
    idle_s: float
    time_s: float
    kv_previous: int = 0
    decode_batch_max: int = 0
    busy_s: float = 0.0
    pulling: bool = False
    queued: int = 0
    preemptible: bool = False
    stalled_s: float = 0.0
    versions: tuple[Version, ...] = ()

    @property
    def held(self) -> set[Version]:
        """Return all versions that the rollout serves."""
        return {self.version, *self.versions}


class RelayStatus(RecordStruct, tag="relay_status/1"):
    """A relay's address, the versions it has and the relay it reads from. Key: relay and term."""

    relay: str
    term: int
    node: str
    url: str
    versions: tuple[Version, ...]
    upstream: str
    time_s: float


class Trajectory(RecordStruct, tag="trajectory/1"):
    """One finished sample, or a dead one (`finish` = `dead`) with the `reason`. Key: group.

    `tokens` and `sources` have one item per token, `logprobs` one per generated token. `reward` is
    None if it comes later as an annotation. `trainer_version` is the newest version known when it
    finished (lag at finish). `reference` is the task's own JSON for the reward, so that any reader
    of the record can score it. `predicted` is the length that its assignment expected. `drafts`
    covers all its generated tokens; None: nothing was drafted, or the engine reports no drafts.
    """

    trajectory: str
    group: int
    index: int
    attempt: int
    task: str
    rollout: str
    rollout_term: int
    tokens: Tokens = field(name="tokens:u4")
    sources: Sources = field(name="sources:u1")
    logprobs: Floats = field(name="logprobs:f4")
    spans: tuple[Span, ...]
    finish: Literal["stop", "length", "dead"]
    reward: float | None
    trainer_version: Version
    started_s: float
    finished_s: float
    temperature: float = 1.0
    reason: str = ""
    scores: dict[str, float] | None = None
    environment: str = ""
    moves: int = 0
    wave: int = 0
    reference: str = ""
    predicted: int = 0
    drafts: Drafts | None = None


class Annotation(RecordStruct, tag="annotation/1"):
    """A late fact about a trajectory; the first of a (trajectory, name) in partition order counts.
    An annotation with a `reason` has no values and states that there will never be any.
    """

    trajectory: str
    group: int
    name: str
    values: Floats = field(name="values:f4")
    scorer: str
    reason: str = ""


class WeightsAnnounced(RecordStruct, tag="weights/1"):
    """A believed version. Key: run and term."""

    run: str
    version: Version
    manifest: str
    manifest_hash: str
    kind: Literal["anchor", "delta", "adapter"]
    parent: Version | None
    bytes: int
    time_s: float


class Applied(RecordStruct, tag="applied/1"):
    """A rollout serves `version`. `hash` is the hash of its manifest, which holds the hash of each
    of the `tensors` given to the engine; they were compared with those hashes (`checked` =
    `hashes`). `compared` of them were also compared with the engine's own memory afterwards
    (`read_back`).
    """

    rollout: str
    rollout_term: int
    version: Version
    hash: str
    checked: str
    tensors: int
    seconds: float
    time_s: float
    compared: int = 0


class Dead(RecordStruct, tag="dead/1"):
    """Bytes that are not a record of topic `source`, their address, and the reason. `cut` is the
    length of the original if `original` is only its beginning, else 0.
    """

    source: str
    partition: int
    offset: int
    reason: str
    original: Bytes = field(name="original:u1")
    cut: int = 0


class Claim(RecordStruct, tag="claim/1"):
    """Stands for a record too large for the log. The object `blob` holds its bytes; `hash` is their
    xxh3-128. The claim carries the record's own envelope.
    """

    blob: str
    bytes: int
    hash: str


Record = (
    Opened
    | Prompt
    | Admitted
    | Assignment
    | Partial
    | RolloutStatus
    | RelayStatus
    | Trajectory
    | Annotation
    | WeightsAnnounced
    | Applied
    | Configured
    | Take
    | TakeRetried
    | TakeFailed
    | Superseded
    | StepDone
    | GroupClosed
    | Dead
    | Claim
)

SCHEMAS: dict[str, type[Record]] = {cls.schema(): cls for cls in get_args(Record)}
"""Schema name with version (`trajectory/1`) → its class."""

TOPIC_RECORDS: dict[str, tuple[type[Record], ...]] = {
    "prompts": (Prompt, Opened),
    "admissions": (Admitted, Opened),
    "assignments": (Assignment, Opened),
    "partials": (Partial,),
    "status": (RolloutStatus, RelayStatus),
    "trajectories": (Trajectory,),
    "annotations": (Annotation,),
    "weights": (WeightsAnnounced, Opened),
    "applied": (Applied,),
    "ledger": (
        Configured,
        Take,
        TakeRetried,
        TakeFailed,
        Superseded,
        StepDone,
        GroupClosed,
        Opened,
    ),
}
"""The records that belong in each topic but `dead`; the archive's columns are in this order."""

SCHEMAS_BY_TOPIC: dict[str, frozenset[str]] = {
    topic: frozenset(cls.schema() for cls in classes)
    for topic, classes in TOPIC_RECORDS.items()
    if Opened not in classes
}
"""Schemas of each topic of many writers. A record of another schema counts as unreadable there.
Otherwise a reader that dispatches on the type would take a foreign `Admitted` in `partials` for
dispatch's own (invariant 12).
"""
