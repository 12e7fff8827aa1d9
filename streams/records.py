"""Every record of the log, one frozen msgspec struct each. The values that they consist of are
defined in `values.py` and can be imported from here.

Array fields are NumPy arrays of the dtype in their annotation; all other fields are in the record's
one JSON header (`codec.py`) under their own names. An array field's wire name carries its NumPy
kind and item size (`tokens:u4`). Evolution: new fields come last and need defaults, unknown fields
are ignored, and a new array without default or any breaking change is a new schema name.

They are structs rather than dataclasses because roles create and read thousands of records: msgspec
builds a struct straight from JSON, in a tenth of the time of a frozen dataclass.

`Partial.start` counts all tokens of a trajectory, `Span`s only the generated ones.
"""

from typing import Literal, dataclass_transform, get_args

import msgspec
from msgspec import field

from rollstream.streams.values import (
    Address,
    AnnotationUsed,
    Bytes,
    Drafts,
    Fence as Fence,
    Floats,
    GroupMembers,
    Member,
    Position as Position,
    ReadTo,
    Sampling,
    Sources,
    Span,
    Tokens,
    Version,
)

PROMPT, GENERATED, ENVIRONMENT = 0, 1, 2  # values of `sources`: where a token came from


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
class _Record(
    msgspec.Struct, frozen=True, eq=False, gc=False, omit_defaults=True, tag_field="schema"
):
    """Compared by identity, because of the arrays. The tag is the schema name with its version."""

    @classmethod
    def schema(cls) -> str:
        return str(cls.__struct_config__.tag)


class Opened(_Record, tag="opened/1"):
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


class Prompt(_Record, tag="prompt/1"):
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


class Admitted(_Record, tag="admitted/1"):
    """A group may be generated now. It belongs to `wave` and is trained at most `deadline_s` after
    its admission.
    """

    group: int
    wave: int
    trajectories: tuple[str, ...]
    deadline_s: float
    prompt: Address


class Assignment(_Record, tag="assignment/1"):
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


class Partial(_Record, tag="partial/1"):
    """What a trajectory gained since the partial `previous`. `start` is the index of its first
    token in the trajectory. `last`: its rollout gave the trajectory up, so it may be resumed
    elsewhere at once. `sources` is empty if all of `tokens` were generated. `drafts` covers the
    tokens generated since `previous`; None: nothing was drafted, or the engine reports no drafts.
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


class RolloutStatus(_Record, tag="rollout_status/1"):
    """The present state of a rollout. Key: rollout and term.

    `health` is `leaving` for a rollout that accepts no more work. `busy_s` is CPU time in prefill
    and decode, `idle_s` time with nothing to decode. `kv_previous` is `kv_used` at the previous
    report. `decode_batch_max` is B_max, the batch size at which another row is no longer nearly
    free in a decode step. `pulling`: it changes to other weights as soon as they have arrived.
    `queued` of the `waiting` were not submitted to the engine yet. `preemptible`: it may be taken
    away at any moment. `stalled_s`: seconds since the last turn of its loop, set when a heartbeat
    thread sends this status; the other fields are then those of that last turn.
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


class RelayStatus(_Record, tag="relay_status/1"):
    """A relay's address, the versions it has and the relay it reads from. Key: relay and term."""

    relay: str
    term: int
    node: str
    url: str
    versions: tuple[Version, ...]
    upstream: str
    time_s: float


class Trajectory(_Record, tag="trajectory/1"):
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


class Annotation(_Record, tag="annotation/1"):
    """A late fact about a trajectory; the first of a (trajectory, name) in partition order counts.
    An annotation with a `reason` has no values and states that there will never be any.
    """

    trajectory: str
    group: int
    name: str
    values: Floats = field(name="values:f4")
    scorer: str
    reason: str = ""


class WeightsAnnounced(_Record, tag="weights/1"):
    """A believed version. Key: run and term."""

    run: str
    version: Version
    manifest: str
    manifest_hash: str
    kind: Literal["anchor", "delta"]
    parent: Version | None
    bytes: int
    time_s: float


class Applied(_Record, tag="applied/1"):
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


class Configured(_Record, tag="configured/1"):
    """What a term of the trainer runs with: hash of the resolved configuration and revision of the
    code.
    """

    configuration_hash: str
    code_revision: str
    resumed_from: int
    accepted: bool = False
    forked_from: str = ""
    """Run and checkpoint that the first term of a fork started from."""
    run_id: str = ""
    """The id that was drawn when the run was created; empty in terms of the first release."""


class Take(_Record, tag="take/1"):
    """One micro-batch of a step: it trains exactly these trajectories, in this order.

    A group named in a take is trained, unless the take is superseded. `groups` lists all members of
    each group whose first take this is. `read` and `believed` are the bounds of that decision: how
    far `trajectories` and `annotations` had been read (every record of an open group below these
    offsets is in `groups` and `annotations`, or lost against an earlier one), and the highest
    believed version. Both are empty in a take that is not the first of any group.
    """

    step: int
    update: int
    micro_batch: int
    members: tuple[Member, ...]
    groups: tuple[GroupMembers, ...]
    annotations: tuple[AnnotationUsed, ...] = ()
    read: tuple[ReadTo, ...] = ()
    believed: Version | None = None


class TakeRetried(_Record, tag="take_retried/1"):
    """The trainer computes a take again that an earlier term left in an unfinished step. If a new
    term's start follows this record directly, the trainer ended within that take. None: all takes
    left by earlier terms are computed.
    """

    step: int
    update: int
    micro_batch: int | None


class TakeFailed(_Record, tag="take_failed/1"):
    """The learner raised `error` on these micro-batches of an update (several if they were computed
    together and the failing one is unknown); the trainer ends.
    """

    step: int
    update: int
    micro_batches: tuple[int, ...]
    error: str


class Superseded(_Record, tag="superseded/1"):
    """The learner cannot compute these micro-batches: no term trains them.

    The groups in `poisoned` end dead. The other groups with a first take among them stay open, and
    later takes of the same update train their members.
    """

    step: int
    update: int
    micro_batches: tuple[int, ...]
    poisoned: tuple[int, ...]
    detail: str


class StepDone(_Record, tag="step_done/1"):
    """A version is complete. `state_hash` covers masters and optimiser; `metrics` and `counts` are
    those of this step.
    """

    step: int
    version: Version
    state_hash: str
    takes: int
    metrics: dict[str, float]
    counts: dict[str, int]
    time_s: float


class GroupClosed(_Record, tag="group_closed/1"):
    """A group ends without being trained (trained groups are named by their takes)."""

    group: int
    reason: Literal["filtered", "expired", "dead"]
    detail: str
    step: int


class Dead(_Record, tag="dead/1"):
    """Bytes that are not a record of topic `source`, their address, and the reason. `cut` is the
    length of the original if `original` is only its beginning, else 0.
    """

    source: str
    partition: int
    offset: int
    reason: str
    original: Bytes = field(name="original:u1")
    cut: int = 0


class Claim(_Record, tag="claim/1"):
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
