"""Defines this release and the features of the log that it knows, so that programs of two releases
agree or refuse to act (invariant 14).

A feature is named by the schema that brings it (`superseded/1`), or by a word where records of a
known schema change their meaning. In each `Opened` the writer of a single-holder role states its
release, the features without which a reader would misread its records in that topic (`needs`), and
all features that it knows (`knows`). A reader that lacks one of `needs` refuses to act. A writer in
a topic of many writers uses a feature only once every acting role knows it.
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
"""Schemas that every release reads: those of 0.1.0, whose `Opened` states nothing."""

WEIGHTS_HASH = "step_done/weights_hash"
"""A `StepDone` may have the hash of the published tensors in place of the hash of the state."""

NEEDED_BY_TOPIC: Mapping[str, tuple[str, ...]] = {
    "ledger": ("superseded/1", "take_failed/1", "take_retried/1", WEIGHTS_HASH),
}
"""By topic: the features that a reader of its single-holder role must know. It lists every schema
that such a role writes and that is not in `FIRST_RELEASE_SCHEMAS`.
"""

NEEDED_FEATURES = tuple(
    sorted({feature for needs in NEEDED_BY_TOPIC.values() for feature in needs})
)
"""All features that a role needs to act on a run in which a trainer of this release has acted."""

SHARED_FEATURES = frozenset[str]().union(*SCHEMAS_BY_TOPIC.values()) - FIRST_RELEASE_SCHEMAS
"""Schemas beyond `FIRST_RELEASE_SCHEMAS` that this release writes in topics of many writers."""

ADAPTERS = "adapters"
"""The feature of a run whose versions are adapters (`weights/1` of kind `adapter`)."""

KNOWN_FEATURES = (frozenset(SCHEMAS) - FIRST_RELEASE_SCHEMAS) | {ADAPTERS, WEIGHTS_HASH}
"""Features that this release understands."""


def missing_features(
    needs: Collection[str], known: Collection[str] = KNOWN_FEATURES
) -> tuple[str, ...]:
    """Return the features of `needs` that are not in `known`, sorted."""
    return tuple(sorted(set(needs) - set(known)))


def check_readable_by(opened: Opened, written: Collection[str] = SHARED_FEATURES) -> None:
    """Raise `NewerRelease` if the acting role, which `opened` describes, cannot read the features
    `written` here in topics of many writers: it would dead-letter every record.
    """
    features = missing_features(written, opened.knows)
    if features:
        raise NewerRelease(
            f"{opened.role} term {opened.term} (release {opened.release or '0.1.0'}) does not read "
            f"what rollstream {RELEASE} writes: {', '.join(features)}; start a {opened.role} of "
            "this release first, or an earlier release here (docs/how-to/upgrade.md)"
        )


def upgrade_advice(release: str) -> str:
    """Advise on a log or store that another release wrote; `release` may be unknown ("")."""
    newer = f"release {release}" if release else "a newer release"
    return f"this is rollstream {RELEASE}: run {newer} or a later one here (docs/how-to/upgrade.md)"
