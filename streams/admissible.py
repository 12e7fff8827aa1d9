"""Which records of topics with many writers count (invariants 3 and 12), by pure functions that all
readers share.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rollstream.errors import DecodeError
from rollstream.streams.branches import branch_problem, leaves, reached_turns
from rollstream.streams.records import (
    ENVIRONMENT,
    GENERATED,
    PROMPT,
    Annotation,
    Partial,
    Trajectory,
)
from rollstream.streams.release import missing_features
from rollstream.streams.token_arrays import (
    ALLOWED,
    allowed_problem,
    heads_problem,
    trainable_arrays,
)
from rollstream.streams.topics import NUMBER_MAX
from rollstream.streams.values import Drafts, Floats, Sources, Turn, Version

RefusalKind = Literal[
    "tokens",
    "arrays",
    "spans",
    "version",
    "logprobs",
    "temperature",
    "reward",
    "label",
    "branches",
    "turns",
    "needs",
]
REFUSAL_KINDS: tuple[RefusalKind, ...] = get_args(RefusalKind)
"""All kinds of refusal. Metrics count refusals by kind, so no other text becomes a label."""
REFUSED_ANNOTATIONS = "refused_annotations"
"""Name of the count in `StepDone.counts`: annotations refused since the previous step."""

LOGPROB_MIN, LOGPROB_MAX = -1e5, 0.1
"""Engines write -9999 for an impossible token, and rounding in 16 bits puts a certain one a little
above 0.
"""
TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-3, 1e3
"""In float32, at the minimum a logit of 100 becomes 1e5, the size of `LOGPROB_MIN`; at the maximum
.1.
"""
REFERENCE_LOGPROBS = "reference_logprobs"
"""The annotation with each generated token's log-probability under the reference policy at the
trajectory's temperature. Abandoned tokens have any value.
"""
_SHOWN_MAX = 200  # characters of a detail: a number of a record may have thousands of digits
SCORES_MAX, LABEL_MAX = 64, 200
"""Most parts of one reward; most characters of a task's or part's name."""


@dataclass(frozen=True, slots=True)
class TrainingBounds:
    """Token ids must be below `vocabulary`, and a trajectory has at most `context_max` tokens. With
    `keep_version` (the policy of that name) all its tokens are of one version.
    """

    vocabulary: int = 1 << 32
    context_max: int = 1 << 40
    keep_version: bool = False


@dataclass(frozen=True, slots=True)
class BelievedVersions:
    """`terms` are ascending pairs (first number, term) of versions up to `highest`: the term
    published that number and the following ones, up to the next pair. Terms of numbers before the
    first pair are unknown.
    """

    highest: int
    terms: tuple[tuple[int, int], ...] = ()

    def is_believed(self, version: Version) -> bool:
        """Returns whether it is at most `highest`, and published by its number's term, if that is
        known.
        """
        if version.number > self.highest:
            return False
        at = bisect_right(self.terms, version.number, key=lambda pair: pair[0])
        return not at or self.terms[at - 1][1] == version.term

    def up_to(self, version: Version | None) -> "BelievedVersions | None":
        """Returns what was believed while `version` was the highest one; None if that is
        unknown.
        """
        return None if version is None else BelievedVersions(version.number, self.terms)


def believed_terms(
    versions: Iterable[Version], before: Iterable[tuple[int, int]] = ()
) -> tuple[tuple[int, int], ...]:
    """Returns `BelievedVersions.terms`, after the pairs of `before` that begin below the lowest
    number.
    """
    terms = list(before)
    for version in sorted(versions):
        while terms and terms[-1][0] >= version.number:
            terms.pop()
        if not terms or terms[-1][1] != version.term:
            terms.append((version.number, version.term))
    return tuple(terms)


@dataclass(frozen=True, slots=True)
class Refusal:
    kind: RefusalKind
    detail: str

    def __str__(self) -> str:
        return f"refused ({self.kind}): {self.detail}"


def refusal(
    record: Trajectory, bounds: TrainingBounds, believed: BelievedVersions | None = None
) -> Refusal | None:
    """Returns why the finished trajectory cannot be trained, or None.

    An accepted trajectory fits the model and the learner's arrays and gives finite float32 losses
    and gradients.

    Without `believed` version numbers have no upper bound.
    """
    generated = int(np.count_nonzero(record.sources == GENERATED))
    return (
        _refuse_needs(record)
        or _refuse_tokens(record, bounds, generated)
        or _refuse_arrays(record, bounds)
        or _refuse_turns(record)
        or _refuse_spans(record, bounds, generated)
        # Terms are not compared here: tokens of a version that another term replaced are masked
        # later (`mask_by_lag`).
        or _refuse_versions(record, believed)
        or _refuse_logprobs(record)
        or _refuse_temperature(record)
        or _refuse_numbers(record)
    )


def is_group_full(samples: int, needed: int, living: int, arrived: int) -> bool:
    """Returns whether a group of so many samples waits for no further completion; `living` are not
    dead. With redundancy the group needs fewer, `needed` (0: all): later completions are surplus,
    never failures, and not trained (invariants 1 and 2).
    """
    return arrived >= samples or (needed > 0 and living >= needed)


def is_bounded_number(value: float) -> bool:
    return -NUMBER_MAX <= value <= NUMBER_MAX  # false for NaN


def is_usable_annotation(note: Annotation) -> bool:
    """Returns whether it has values within the bounds, or a reason why there are none."""
    values = note.values
    return bool(note.reason) or (len(values) > 0 and bool((np.abs(values) <= NUMBER_MAX).all()))


def reference_problem(record: Trajectory, values: Floats) -> str:
    """Returns why values of `REFERENCE_LOGPROBS` cannot be the trajectory's, or ""."""
    if len(values) != len(record.logprobs):
        return f"{len(values)} values for {len(record.logprobs)} generated tokens"
    low, high = float(values.min()), float(values.max())
    if not LOGPROB_MIN <= low <= high <= LOGPROB_MAX:  # also for NaN
        return f"values from {low:g} to {high:g}, outside {LOGPROB_MIN:g} to {LOGPROB_MAX:g}"
    return ""


def refused_counts(refusals: Iterable[Refusal]) -> Mapping[str, int]:
    """Returns the number of refusals of each kind that occurs, as `refused_<kind>` for
    `StepDone.counts`.
    """
    counts: dict[str, int] = {}
    for refused in refusals:
        name = f"refused_{refused.kind}"
        counts[name] = counts.get(name, 0) + 1
    return counts


def _refuse_tokens(record: Trajectory, bounds: TrainingBounds, generated: int) -> Refusal | None:
    tokens, sources = record.tokens, record.sources
    if len(sources) != len(tokens):
        return Refusal("arrays", f"{len(tokens)} tokens but {len(sources)} sources")
    if len(record.logprobs) != generated:
        what = f"{generated} generated tokens but {len(record.logprobs)} log-probabilities"
        return Refusal("arrays", what)
    if not generated:
        return Refusal("arrays", "it has no generated token")
    if sources[0] == GENERATED:
        what = "its first token is generated, a prompt of at least one token must precede it"
        return Refusal("arrays", what)
    if int(sources.max()) > ENVIRONMENT:
        return Refusal("arrays", f"source {int(sources.max())} is none of 0, 1, 2")
    if problem := branch_problem(len(tokens), record.branches):
        return Refusal("branches", problem)
    if any(branch.at < 0 and sources[branch.start] == GENERATED for branch in record.branches):
        return Refusal("branches", "a path begins with a generated token")
    longest = max(map(len, leaves(len(tokens), record.branches)))
    if longest > bounds.context_max:
        return Refusal("tokens", f"{longest} tokens in a context of {bounds.context_max}")
    if int(tokens.max()) >= bounds.vocabulary:
        what = f"token {int(tokens.max())}, and the model knows {bounds.vocabulary}"
        return Refusal("tokens", what)
    return None


def _refuse_needs(record: Trajectory) -> Refusal | None:
    if not record.needs:
        return None
    missing = missing_features(record.needs)
    # A later release wrote it, for a trainer that has these features.
    return Refusal("needs", f"it needs {', '.join(missing)}"[:_SHOWN_MAX]) if missing else None


def _refuse_arrays(record: Trajectory, bounds: TrainingBounds) -> Refusal | None:
    if not record.arrays and record.array_bytes is None:
        return None
    if problem := heads_problem(record, len(record.tokens)):
        return Refusal("arrays", problem)
    try:
        allowed = trainable_arrays(record).get(ALLOWED)
    except DecodeError as error:
        return Refusal("arrays", str(error))
    problem = allowed_problem(allowed, record.tokens, record.sources, bounds.vocabulary)
    return Refusal("arrays", problem) if problem else None


def _refuse_turns(record: Trajectory) -> Refusal | None:
    if not record.turns:
        has_any = record.branches or record.abandoned
        return Refusal("turns", "it has branches but no turns") if has_any else None
    if problem := turns_problem(record.turns, record.sources):
        return Refusal("turns", problem)
    return _refuse_abandoned(record) if record.abandoned else None


def turns_problem(turns: Sequence[Turn], sources: Sources) -> str:
    """Returns "" if the turns tile the tokens, and exactly the tokens that a turn sampled are
    generated.
    """
    sampled = np.zeros(len(sources), np.bool_)
    before = 0
    for turn in turns:
        if turn.start != before or not turn.start <= turn.generated < turn.end <= len(sampled):
            return f"a turn of tokens [{turn.start}, {turn.end}) after {before}"[:_SHOWN_MAX]
        sampled[turn.generated : turn.end] = True
        before = turn.end
    if before != len(sampled) or (sampled != (sources == GENERATED)).any():
        return f"its turns do not cover its {len(sampled)} tokens"
    return ""


def _refuse_abandoned(record: Trajectory) -> Refusal | None:
    abandoned = set(record.abandoned)
    trained_turns = set(range(len(record.turns))) - abandoned
    # An abandoned turn that the episode lacks.
    if len(trained_turns) != len(record.turns) - len(record.abandoned):
        return Refusal("turns", f"abandoned turns {record.abandoned} of {len(record.turns)}")
    if not trained_turns:
        return Refusal("turns", "all its turns are abandoned")
    continued = reached_turns(record.turns, record.branches, trained_turns) & abandoned
    if continued:
        return Refusal("turns", f"its turn {min(continued)} is abandoned, but continued")
    return None


def _refuse_spans(record: Trajectory, bounds: TrainingBounds, generated: int) -> Refusal | None:
    edges = [0, *(span.end for span in record.spans)]
    is_tiled = edges[-1] == generated and all(
        start == span.start < span.end for start, span in zip(edges, record.spans, strict=False)
    )
    if not is_tiled:
        return Refusal("spans", f"its spans do not tile its {generated} generated tokens")
    if bounds.keep_version and len(record.spans) > 1:
        return Refusal("spans", f"{len(record.spans)} spans under keep_version")
    return None


def _refuse_versions(record: Trajectory, believed: BelievedVersions | None) -> Refusal | None:
    numbers = [span.version.number for span in record.spans]
    if min(numbers) < 0:
        return Refusal("version", "the number of a version is below 0")
    if believed is not None and max(numbers) > believed.highest:
        # The number itself may have thousands of digits.
        return Refusal("version", f"a version above {believed.highest}, the highest believed one")
    return None


def _refuse_logprobs(record: Trajectory) -> Refusal | None:
    low, high = float(record.logprobs.min()), float(record.logprobs.max())  # NaN passes through
    if not np.isfinite([low, high]).all():
        return Refusal("logprobs", "a log-probability is not finite")
    if low < LOGPROB_MIN or high > LOGPROB_MAX:
        worst = low if low < LOGPROB_MIN else high
        what = f"a log-probability of {worst:g}, outside {LOGPROB_MIN:g} to {LOGPROB_MAX:g}"
        return Refusal("logprobs", what)
    return None


def _refuse_temperature(record: Trajectory) -> Refusal | None:
    if TEMPERATURE_MIN <= record.temperature <= TEMPERATURE_MAX:
        return None
    what = f"it was sampled at temperature {record.temperature:g}; train with"
    what += f" sampling.temperature between {TEMPERATURE_MIN:g} and {TEMPERATURE_MAX:g}"
    return Refusal("temperature", what)


def _refuse_numbers(record: Trajectory) -> Refusal | None:
    return refused_score(record.reward, record.scores or {}, record.task)


def refused_score(
    reward: float | None, scores: Mapping[str, float], task: str = ""
) -> Refusal | None:
    """Returns why the reward and scores cannot be trained on."""
    if reward is not None and not is_bounded_number(reward):
        return Refusal("reward", f"a reward of {reward:g}, beyond ±{NUMBER_MAX:g}")
    if not all(map(is_bounded_number, scores.values())):
        return Refusal("reward", f"a score beyond ±{NUMBER_MAX:g}")
    if len(scores) > SCORES_MAX or any(len(name) > LABEL_MAX for name in (task, *scores)):
        what = f"more than {SCORES_MAX} scores, or a name of more than {LABEL_MAX} characters"
        return Refusal("label", what)
    return None


COUNT_MAX = 1 << 53
"""Largest count accepted from another program: exact in JSON everywhere, and a sum of a few stays
within 64 bits.
"""


def is_count(value: int) -> bool:
    return 0 <= value <= COUNT_MAX


def is_version(version: Version) -> bool:
    return is_count(version.number) and is_count(version.term)


def malformed_partial(link: Partial) -> str:
    """Returns why the partial cannot be part of a trajectory's chain, or "". Its spans must tile
    its generated tokens, under versions within bounds; each token is generated or the environment's
    (without `sources` all are generated), but an episode's first partial begins with the program's
    prompt; log-probabilities are finite; arrays have rows of its tokens or earlier ones, and this
    release has what it needs.
    """
    if not (is_count(link.start) and is_count(link.attempt)):
        return "its start or its attempt is out of bounds"
    if link.drafts is not None and not all(map(is_count, _counts(link.drafts))):
        return "a count of its drafts is out of bounds"
    if len(link.sources) not in (0, len(link.tokens)):
        return f"{len(link.sources)} sources for {len(link.tokens)} tokens"
    if len(link.sources) and not np.isin(_after_prompt(link), (GENERATED, ENVIRONMENT)).all():
        return "a source that is neither generated nor the environment's"
    if any(
        not link.start <= branch.start < link.start + len(link.tokens) for branch in link.branches
    ):
        return "a branch outside of its tokens"
    generated = int((link.sources == GENERATED).sum()) if len(link.sources) else len(link.tokens)
    if generated != len(link.logprobs):
        return f"{len(link.logprobs)} log-probabilities for {generated} generated tokens"
    if not np.isfinite(link.logprobs).all():
        return "a log-probability that is not finite"
    return _spans_problem(link, generated) or heads_problem(link, link.start + len(link.tokens))


def _after_prompt(link: Partial) -> Sources:
    # Only the first partial of an episode has the prompt.
    if link.start:
        return link.sources
    indices = np.flatnonzero(link.sources != PROMPT)
    return link.sources[indices[0] :] if len(indices) else link.sources[:0]


def _counts(drafts: Drafts) -> tuple[int, ...]:
    return (*drafts.runs, drafts.steps, drafts.guessed, drafts.asked, drafts.found)


def _spans_problem(link: Partial, generated: int) -> str:
    at = link.spans[0].start if link.spans else 0
    if not is_count(at) or (generated and not link.spans):
        return "no spans, or one that starts out of bounds"
    first = at
    for span in link.spans:
        if span.start != at or span.end <= span.start or not is_version(span.version):
            return f"span [{span.start}, {span.end}) where one from {at} on comes next"
        at = span.end
    return "" if at - first == generated else f"spans of {at - first} for {generated} tokens"
