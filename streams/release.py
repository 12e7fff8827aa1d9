"""The features of the log that this release knows: programs of two releases agree on what records
mean, or one refuses to act (invariant 14). A feature is a schema that came after release 0.1.0, or
a word where a known schema changed its meaning.
"""

from collections.abc import Collection, Mapping

from rollstream.errors import NewerRelease
from rollstream.streams.records import SCHEMAS, SCHEMAS_BY_TOPIC, Opened

RELEASE = "0.2.0"

FIRST_RELEASE_SCHEMAS = frozenset(
    f"{name}/1"
    for name in (
        "opened", "prompt", "admitted", "assignment", "partial", "rollout_status", "relay_status",
        "trajectory", "annotation", "weights", "applied", "configured", "take", "step_done",
        "group_closed", "dead", "claim",
    )
)  # fmt: skip
"""Schemas that every release reads: those of 0.1.0, whose `Opened` lists no features."""

WEIGHTS_HASH = "step_done/weights_hash"
"""A `StepDone` may have the hash of the published tensors in place of that of the trainer's state.
"""

NEEDED_BY_TOPIC: Mapping[str, tuple[str, ...]] = {
    "ledger": (
        "superseded/1",
        "take_failed/1",
        "take_retried/1",
        WEIGHTS_HASH,
    ),
}
"""What a reader of a topic must know (`Opened.needs`): every schema beyond `FIRST_RELEASE_SCHEMAS`,
and the words for changed meanings. A feature that only some settings write is in `run.json` where
they are set (`FEATURES_OF_SETTINGS`), so that an earlier release continues the other runs.
"""

NEEDED_FEATURES = tuple(
    sorted({feature for needs in NEEDED_BY_TOPIC.values() for feature in needs})
)
"""In `run.json` once a trainer of this release has acted on the run, so that every role must know
them.
"""

SHARED_FEATURES = frozenset[str]().union(*SCHEMAS_BY_TOPIC.values()) - FIRST_RELEASE_SCHEMAS
"""Schemas beyond `FIRST_RELEASE_SCHEMAS` that this release writes in topics of many writers."""

EPOCHS = "takes_repeated/1"
"""The trainer trains each batch more than once (`trainer.epochs`); in `run.json` only."""

ADAPTERS = "adapters"
"""Versions are adapters (records `weights/1` of the kind `adapter`); in `run.json` only."""

AGENTS = "agents"
"""Trajectories are episodes of agents: they have turns and may branch, and a reader without it
would take their tokens for one sequence; in `run.json` only.
"""

ABANDONED = "agents/abandoned"
"""Episodes may have turns that are not trained (`Trajectory.abandoned`), and more branches than
paths, because turns are generated together. A reader without it would train abandoned turns.
"""

REDUNDANCY = "redundancy"
"""Groups are complete before all their trajectories have ended (`Admitted.needed`); in `run.json`
only.
"""

PROCESS_REWARDS = "process_rewards"
"""The run trains on annotations with a value for each turn or token: a reader without it would take
the first value for the reward; in `run.json` only.
"""

SCORED_REFERENCE = "scored_reference"
"""The trainer takes the reference's log-probabilities from annotations: a reader without it would
expect samples that lack them to be trained; in `run.json` only.
"""

CRITIC = "critic"
"""The run trains a critic: its checkpoints hold it, and a reader without it would continue without.
In `run.json` only.
"""

ALLOWED_TOKENS = "arrays/allowed"
"""Tokens may have been sampled from a part of the vocabulary, which an array of the trajectory has
(`token_arrays.py`): a reader without it would compare them with the whole distribution. In the
`needs` of these records; in `run.json` and checked by the rollouts, if the engine writes it.
"""

FEATURES_OF_SETTINGS = frozenset(
    {
        ABANDONED, ADAPTERS, AGENTS, ALLOWED_TOKENS, CRITIC, EPOCHS, PROCESS_REWARDS, REDUNDANCY,
        SCORED_REFERENCE,
    }
)  # fmt: skip
"""Features that only runs with certain settings need (`config/recorded_configuration.py`)."""

KNOWN_FEATURES = (
    (frozenset(SCHEMAS) - FIRST_RELEASE_SCHEMAS) | FEATURES_OF_SETTINGS | {WEIGHTS_HASH}
)
"""All features that this release understands (`Opened.knows`)."""


def missing_features(
    needs: Collection[str], supported: Collection[str] = KNOWN_FEATURES
) -> tuple[str, ...]:
    """Returns the features of `needs` that are not in `supported`, sorted."""
    return tuple(sorted(set(needs) - set(supported)))


def check_readable_by(opened: Opened, written: Collection[str] = SHARED_FEATURES) -> None:
    """Raise `NewerRelease` if a role's holder lacks one of the features `written` by this program:
    it would dead-letter these records.
    """
    features = missing_features(written, opened.knows)
    if features:
        raise NewerRelease(
            f"{opened.role} term {opened.term} (release {opened.release or '0.1.0'}) does not read "
            f"what rollstream {RELEASE} writes: {', '.join(features)}; start a {opened.role} of "
            "this release first, or an earlier release here (docs/how-to/upgrade.md)"
        )


def upgrade_advice(release: str) -> str:
    """Returns the end of an error message about what a newer release wrote; `release` is "" if
    unknown.
    """
    newer = f"release {release}" if release else "a newer release"
    return f"this is rollstream {RELEASE}: run {newer} or a later one here (docs/how-to/upgrade.md)"
