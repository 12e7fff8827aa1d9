"""Defines the records of the log, one frozen msgspec struct each, and which of them each topic
holds (`TOPIC_RECORDS`). The records of the ledger are defined in `ledger_records.py`, those of
`status` in `status_records.py`, the values inside records and the rules for records
(`RecordStruct`) in `values.py`.

The docstrings of the records are the text of `docs/reference/records.md`. "Key" in them is the key
under which a record is appended: equal keys share a partition, and a compacted topic (`status`,
`weights`) keeps only the newest record of each key.

Reading list: begins here, before `streams/bus.py`.
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
    TakesRepeated as TakesRepeated,
)
from rollstream.streams.status_records import (
    RelayStatus as RelayStatus,
    RolloutStatus as RolloutStatus,
)
from rollstream.streams.values import (
    Address,
    ArrayHead,
    Branch,
    Bytes,
    Drafts,
    Fence as Fence,
    Floats,
    Position as Position,
    RecordStruct,
    Sampling,
    SettingsSince,
    Sources,
    Span,
    Tokens,
    Turn,
    Version,
)

# Values of `sources`, which state for each token of a trajectory where it came from. Environment
# tokens are replies in a dialogue.
PROMPT, GENERATED, ENVIRONMENT = 0, 1, 2


class Opened(RecordStruct, tag="opened/1"):
    """First record of a term, in every partition of a single-holder role's topic: records of lower
    terms after it are void.

    `release` is the release of the program that writes it. `needs` are the features of the log
    (`release.py`) without which a reader would misread what this term writes in the topic. `knows`
    are all features that the writer knows beyond those of the first release. All three are empty if
    the writer is of the first release.
    """

    role: str
    term: int
    release: str = ""
    needs: tuple[str, ...] = ()
    knows: tuple[str, ...] = ()


class Prompt(RecordStruct, tag="prompt/1"):
    """One prompt, for which a group of `samples` trajectories is generated. `group` is the group's
    number: the index of the prompt in the task's order, which the run's `seed` determines.
    `reference` is the task's own JSON for the reward. `epoch` counts the passes over the data set
    that were complete before this prompt. `needed` is the number of samples that are trained, the
    first that end; 0: all. `settings` names the configuration under which the prompt is made.
    """

    group: int
    task: str
    tokens: Tokens = field(name="tokens:u4")
    samples: int
    sampling: Sampling
    seed: int
    reference: str = ""
    epoch: int = 0
    needed: int = 0
    settings: SettingsSince | None = None


class Admitted(RecordStruct, tag="admitted/1"):
    """A group may be generated now: `trajectories` are the names of its samples, `prompt` is the
    address of its prompt, and `wave` is the number of the wave that it belongs to. `deadline_s`
    seconds later the trainer waits no longer for missing trajectories: it trains the group with
    those that have finished, or closes it as expired. With `needed` above 0 the group is complete
    once so many trajectories have finished alive (`is_group_full`); the others are released.
    `settings` is that of the prompt, if the run's settings changed before it.
    """

    group: int
    wave: int
    trajectories: tuple[str, ...]
    deadline_s: float
    prompt: Address
    needed: int = 0
    settings: SettingsSince | None = None


class Assignment(RecordStruct, tag="assignment/1"):
    """Dispatch's order that a rollout (of this term) starts, resumes or releases a trajectory, the
    one with number `index` in its group. `moves` counts the trajectory's earlier assignments.

    A `start` or `resume` carries all that generation needs; `tokens` are those of the prompt.
    `version` is the version that the rollout must serve: for a resume under `keep_version` exactly
    this one, else one of at least this number. `partial` is the address of the newest partial, from
    which the trajectory is resumed; None: it starts from the prompt. `first` is the address of its
    oldest partial, from which on the chain is read. `predicted` is the expected number of generated
    tokens in all, 0 if unknown. `from_history`: the rollout does not serve `version`, so it first
    loads that old version from the store.

    `onward` of a `release` names the rollout that will resume the trajectory, so that its tokens
    are kept in a last partial; empty: the trajectory is no longer needed.
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
    """The tokens that a trajectory gained since its previous partial, whose address is `previous`
    (None for the first). Key: trajectory. `start` is the index of the first of these tokens among
    all tokens of the trajectory; the indices in `spans` count only generated tokens. `logprobs` has
    one item per generated token. `sources` is empty if all of `tokens` were generated.

    `environment` is the state of the task's environment after its newest reply, `failures` why it
    failed before and was asked again. While a reply or reward is awaited, the newest token is left
    out; a resume generates it again, and asks again. `last`: the rollout gave the trajectory up, so
    another may resume it at once. `drafts` covers the tokens generated since `previous`; None:
    nothing was drafted, or the engine reports no drafts.

    In an episode of an agent `turns` are the requests that these tokens answer, `branches` the
    places where they branch, and `environment` is the reward that its program has set, as JSON.

    `arrays`, `array_bytes` and `needs` are as in `Trajectory`, with the rows that came since
    `previous`: those of these tokens, and perhaps of earlier ones that had none.
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
    failures: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    branches: tuple[Branch, ...] = ()
    arrays: tuple[ArrayHead, ...] = ()
    array_bytes: Bytes | None = field(name="array_bytes:u1", default=None)
    needs: tuple[str, ...] = ()


class Trajectory(RecordStruct, tag="trajectory/1"):
    """One finished sample, the one with number `index` in its group. Key: group. `finish` is `stop`
    (it ended by a stop token), `length` (at a limit of its length) or `dead` (it failed, for the
    `reason`).

    `tokens` and `sources` have one item per token, `logprobs` one per generated token. `reward` is
    None if it comes later as an annotation; `scores` are named parts of the judgement.
    `trainer_version` is the newest version that the rollout knew when the sample finished (for the
    lag at finish). `reference` is the task's own JSON for the reward, so that any reader of the
    record can score it. `predicted` is the number of generated tokens that its assignment expected,
    0 if unknown. `environment`, `failures` and `moves` are as in `Partial` and `Assignment`.
    `waiting_s` are the seconds since `started_s` in which it waited for its environment; None: it
    has none. `drafts` covers all its generated tokens; None: nothing was drafted, or the engine
    reports no drafts.

    In an episode of an agent `turns` are the requests of its program, and `branches` the places
    where its tokens branch; without branches the tokens are one sequence. `abandoned` are the
    indices of the turns that only an earlier start of the program asked for, which took another way
    before it was killed; they are not trained.

    `arrays` are named arrays that the engine wrote beside its tokens, with their rows in
    `array_bytes` (None: there are none). A token without a row was generated by an engine that did
    not write the array. `needs` are the features (`release.py`) without which training on the
    record would be wrong; a reader that lacks one refuses it.
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
    failures: tuple[str, ...] = ()
    waiting_s: float | None = None
    turns: tuple[Turn, ...] = ()
    branches: tuple[Branch, ...] = ()
    abandoned: tuple[int, ...] = ()
    arrays: tuple[ArrayHead, ...] = ()
    array_bytes: Bytes | None = field(name="array_bytes:u1", default=None)
    needs: tuple[str, ...] = ()


class Annotation(RecordStruct, tag="annotation/1"):
    """A fact about a trajectory that comes after it, for instance a reward, under a `name`. Of
    several with the same trajectory and name the first in the order of the partition counts.
    `scorer` is the process that wrote it. An annotation with a `reason` has no values and states
    that there will never be any.
    """

    trajectory: str
    group: int
    name: str
    values: Floats = field(name="values:f4")
    scorer: str
    reason: str = ""


class WeightsAnnounced(RecordStruct, tag="weights/1"):
    """A version that is believed from now on. Key: run and term. `manifest` is the key of its
    manifest in the store, for a named weight stream below `streams/NAME/`, `manifest_hash` the hash
    of that object. It is stored in full (`anchor`), as its difference from `parent` (`delta`), or
    as a LoRA adapter (`adapter`), in `bytes` bytes.
    """

    run: str
    version: Version
    manifest: str
    manifest_hash: str
    kind: Literal["anchor", "delta", "adapter"]
    parent: Version | None
    bytes: int
    time_s: float


class Applied(RecordStruct, tag="applied/1"):
    """A rollout serves `version`; the engine took it in `seconds`. `hash` is the hash of the
    version's manifest, which holds the hash of every tensor. The `tensors` that the engine was
    given (their number) were compared with these hashes. Afterwards `compared` of them were also
    read back from the engine and compared; if any was, `checked` is `read_back`, else `hashes`.
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
    """Bytes that are not a record of the topic `source`, with their address there and the reason.
    `original` holds these bytes; if it holds only their beginning, `cut` is their whole length,
    else 0.
    """

    source: str
    partition: int
    offset: int
    reason: str
    original: Bytes = field(name="original:u1")
    cut: int = 0


class Claim(RecordStruct, tag="claim/1"):
    """Stands in the log for a record that is too large for it. The object `blob` in the store holds
    the record's bytes; `hash` is their xxh3-128. The claim carries the record's own envelope: role,
    term and sequence number of its writer.
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
    | TakesRepeated
    | StepDone
    | GroupClosed
    | Dead
    | Claim
)

SCHEMAS: dict[str, type[Record]] = {cls.schema(): cls for cls in get_args(Record)}
"""Maps each schema name with version, e.g. `trajectory/1`, to the class of its records."""

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
        TakesRepeated,
        StepDone,
        GroupClosed,
        Opened,
    ),
}
"""The records that belong in each topic but `dead`. `Opened` is in the topics that a single-holder
role writes. The archive's columns are in the order of these records.
"""

SCHEMAS_BY_TOPIC: dict[str, frozenset[str]] = {
    topic: frozenset(cls.schema() for cls in classes)
    for topic, classes in TOPIC_RECORDS.items()
    if Opened not in classes
}
"""The schemas that belong in each topic of many writers. A record of another schema counts as
unreadable there: otherwise a reader that distinguishes records by type alone would take an
`Admitted` that some process wrote into `partials` for one of dispatch (invariant 12).
"""
