"""Every record that flows, one frozen dataclass each, and the few values they are made of.

Array fields are NumPy arrays of the dtype in their annotation; all other fields travel in the
record's one JSON header (`codec.py`). Evolution: new fields need defaults, unknown fields are
ignored, a breaking change is a new schema name.

Positions: `Address` names one record of a topic, `Position` says where to read on and carries the
fence there. Token indices: `Span`s count *generated* tokens of a trajectory (0 is its first
generated token), so the spans of a trajectory tile `[0, len(logprobs))` exactly (invariant 3);
`Partial.start` counts all tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]
Sources = NDArray[np.uint8]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PROMPT, GENERATED, ENVIRONMENT = 0, 1, 2  # values of `sources`: where a token came from

SCHEMAS: dict[str, type] = {}
"""Schema name with version (`trajectory/1`) → its class."""

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def _record(schema: str) -> Callable[[type[_T]], type[_T]]:
    def register(cls: type[_T]) -> type[_T]:
        # No slots: the codec fills a decoded record's __dict__ at once, field by field took twice
        # as long.
        frozen = dataclass(frozen=True, eq=False)(cls)
        frozen.SCHEMA = schema  # pyright: ignore[reportAttributeAccessIssue]
        SCHEMAS[schema] = frozen
        return frozen

    return register


# ---- values --------------------------------------------------------------------------------------
# --------------


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Number of steps behind a set of weights, and the term of the trainer that published it."""

    number: int
    term: int

    def __str__(self) -> str:
        return f"v{self.number:08d}-t{self.term:04d}"


@dataclass(frozen=True, slots=True)
class Span:
    """Generated tokens `[start, end)` were emitted under `version`."""

    start: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where one record lies in its topic."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Highest term whose `Opened` was read, and the next sequence number expected of it."""

    term: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """Where to read on in one partition, and the fence there; in topics of many writers the fence
    stays empty.
    """

    offset: int = 0
    fence: Fence = Fence()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens; `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    tokens_max: int = 256
    stop: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """One trajectory record by its address and the xxh3-64 of its bytes (hex)."""

    trajectory: str
    at: Address
    hash: str


@dataclass(frozen=True, slots=True)
class AnnotationUsed:
    """One annotation record that a step used."""

    trajectory: str
    name: str
    at: Address
    hash: str


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """All completions of a group, dead ones included, fixed by the group's first `Take`."""

    group: int
    members: tuple[Member, ...]


# ---- records -------------------------------------------------------------------------------------
# --------------


@_record("opened/1")
class Opened:
    """First record of a term, in every partition of a single-holder role's topic: lower terms are
    void after it.
    """

    SCHEMA: ClassVar[str]
    role: str
    term: int


@_record("prompt/1")
class Prompt:
    """One prompt of the seeded order; `group` is its place in it. `reference` is the task's own
    JSON for the reward.
    """

    SCHEMA: ClassVar[str]
    group: int
    task: str
    tokens: Tokens
    samples: int
    sampling: Sampling
    seed: int
    reference: str = ""
    epoch: int = 0


@_record("admitted/1")
class Admitted:
    """A group may be generated now; it belongs to `wave` and is trained, at the latest,
    `deadline_s` from here.
    """

    SCHEMA: ClassVar[str]
    group: int
    wave: int
    trajectories: tuple[str, ...]
    deadline_s: float
    prompt: Address


@_record("assignment/1")
class Assignment:
    """The order: rollout R of this term, do this to this trajectory.

    `start` and `resume` carry all that generation needs. `version` is what the rollout must hold:
    for a start at least this number; for a resume under `keep_version` exactly this version.
    `partial` is the newest partial of the chain to go on from; None starts from the prompt.
    """

    SCHEMA: ClassVar[str]
    kind: Literal["start", "resume", "release"]
    trajectory: str
    group: int
    index: int
    attempt: int
    rollout: str
    rollout_term: int
    version: Version
    task: str
    tokens: Tokens
    sampling: Sampling
    seed: int
    reference: str = ""
    partial: Address | None = None
    moves: int = 0
    wave: int = 0


@_record("partial/1")
class Partial:
    """What a trajectory gained since `previous`; `start` is the index of its first token in the
    trajectory.
    """

    SCHEMA: ClassVar[str]
    trajectory: str
    group: int
    attempt: int
    rollout: str
    rollout_term: int
    previous: Address | None
    start: int
    tokens: Tokens
    sources: Sources
    logprobs: Floats
    spans: tuple[Span, ...]
    environment: str = ""


@_record("rollout_status/1")
class RolloutStatus:
    """What a rollout does now. Key: rollout and term. `health` is `leaving` for one that takes
    nothing more. `busy_s` is CPU time in prefill and decode, `idle_s` time with nothing to decode.
    """

    SCHEMA: ClassVar[str]
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


@_record("relay_status/1")
class RelayStatus:
    """Where a relay is, what it has and whom it reads from. Key: relay and term."""

    SCHEMA: ClassVar[str]
    relay: str
    term: int
    node: str
    url: str
    versions: tuple[Version, ...]
    upstream: str
    time_s: float


@_record("trajectory/1")
class Trajectory:
    """One finished sample, or that it died and why (`finish` = `dead`, `reason`). Key: group.

    `tokens` and `sources` are as long as the trajectory, `logprobs` as its generated tokens.
    `reward` is None when it comes later as an annotation. `trainer_version` is the newest version
    known when it finished (lag at finish).
    """

    SCHEMA: ClassVar[str]
    trajectory: str
    group: int
    index: int
    attempt: int
    task: str
    rollout: str
    rollout_term: int
    tokens: Tokens
    sources: Sources
    logprobs: Floats
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


@_record("annotation/1")
class Annotation:
    """A late fact about a trajectory; the first of a (trajectory, name) in partition
    order counts.
    """

    SCHEMA: ClassVar[str]
    trajectory: str
    group: int
    name: str
    values: Floats
    scorer: str


@_record("weights/1")
class WeightsAnnounced:
    """A believed version. Key: run and term."""

    SCHEMA: ClassVar[str]
    run: str
    version: Version
    manifest: str
    manifest_hash: str
    kind: Literal["anchor", "delta"]
    parent: Version | None
    bytes: int
    time_s: float


@_record("applied/1")
class Applied:
    """A rollout serves `version`; `checked` says how it knows (`hashes`, `read_back`)."""

    SCHEMA: ClassVar[str]
    rollout: str
    rollout_term: int
    version: Version
    hash: str
    checked: str
    tensors: int
    seconds: float
    time_s: float


@_record("configured/1")
class Configured:
    """What a term of the trainer runs with: hash of the resolved configuration and revision of the
    code.
    """

    SCHEMA: ClassVar[str]
    configuration_hash: str
    code_revision: str
    resumed_from: int
    accepted: bool = False


@_record("take/1")
class Take:
    """One micro-batch of a step: exactly these trajectories, in this order, and nothing else, are
    trained by it.

    A group named in a take is trained. `groups` lists all members of each group whose first take
    this is.
    """

    SCHEMA: ClassVar[str]
    step: int
    update: int
    micro_batch: int
    members: tuple[Member, ...]
    groups: tuple[GroupMembers, ...]
    annotations: tuple[AnnotationUsed, ...] = ()


@_record("step_done/1")
class StepDone:
    """A version is complete. `state_hash` covers masters and optimiser; `metrics` and `counts` are
    of this step.
    """

    SCHEMA: ClassVar[str]
    step: int
    version: Version
    state_hash: str
    takes: int
    metrics: dict[str, float]
    counts: dict[str, int]
    time_s: float


@_record("group_closed/1")
class GroupClosed:
    """A group ends without being trained (a trained one is named by its takes)."""

    SCHEMA: ClassVar[str]
    group: int
    reason: Literal["filtered", "expired", "dead"]
    detail: str
    step: int


@_record("dead/1")
class Dead:
    """Bytes that a reader of `source` could not take for a record, where they lay, and why."""

    SCHEMA: ClassVar[str]
    source: str
    partition: int
    offset: int
    reason: str
    original: Bytes


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
    | StepDone
    | GroupClosed
    | Dead
)
