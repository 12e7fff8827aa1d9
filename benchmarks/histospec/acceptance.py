"""`draft_accept_vs_vllm`: replays the recorded answers of each pass against those of the pass
before, by our drafts and by vLLM's suffix decoding.

Both verify a draft up to its first rejected token and gain one token more; no model runs. Their
cost is made equal: the smallest probability at which our drafts are cut is searched for until both
verify the same number of tokens.

vLLM's drafts are those of its `SuffixDecodingProposer` with its defaults: a tree over all earlier
answers and one over the sequence itself, 24 deep; the likelier of both is used. The tree is
arctic-inference's, which is not installed here: `SUFFIX_TREE` names it
(docs/explanation/drafts.md).
"""

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.case import Case, against
from benchmarks.runs.epochs import Pass, history_of
from rollstream.producers.drafts.history import AnswerHistory, prompt_key
from rollstream.producers.drafts.planner import AcceptanceCurve, DraftRow, HistoryAgreement
from rollstream.streams.records import PROMPT, Trajectory

DEPTH, LEAST_CHANCE, FACTOR = 24, 0.1, 1.0  # vLLM's defaults; drafts are as long as trees are deep
MOST = 32  # length of our drafts in tokens
HALVINGS = 10  # steps of the search for the smallest probability


@dataclass(frozen=True, slots=True)
class Replayed:
    """Sums over answers: `gained` tokens in `passes`; `right` of the `guessed` tokens were
    accepted.
    """

    gained: int = 0
    passes: int = 0
    guessed: int = 0
    right: int = 0

    def __add__(self, other: "Replayed") -> "Replayed":
        return Replayed(
            self.gained + other.gained,
            self.passes + other.passes,
            self.guessed + other.guessed,
            self.right + other.right,
        )

    @property
    def acceptance(self) -> float:
        return self.right / max(1, self.guessed)

    @property
    def per_token(self) -> float:
        """Tokens verified per token gained."""
        return self.guessed / max(1, self.gained)

    def words(self) -> str:
        return f"{self.acceptance:.3f} at {self.gained / max(1, self.passes):.1f} tokens per pass"


def acceptance(passes: Sequence[Pass]) -> Iterator[Case]:
    """Yields one case; without the tree, a line that states it."""
    tree = suffix_tree()
    if tree is None:
        line = "draft_accept_vs_vllm  not measured: vLLM's suffix decoding needs arctic-inference"
        print(
            f"{line}, and SUFFIX_TREE names no tree of it (docs/explanation/drafts.md)",
            file=sys.stderr,
        )
        return
    theirs, ours = Replayed(), Replayed()
    for before, now in pairwise(passes):
        reference = replayed_by_tree(tree, before.answers, now.answers)
        ours += replayed_as_often(history_of(before), now.answers, reference.per_token)
        theirs += reference
    yield against(
        "draft_accept_vs_vllm",
        ours.acceptance,
        "accepted/verified",
        "vLLM's suffix decoding at equal verified tokens",
        theirs.acceptance,
        1.0,
        f"{ours.words()}, {ours.per_token:.3f} verified per token; theirs {theirs.words()}, "
        f"{theirs.per_token:.3f}; {len(passes) - 1} passes",
    )


def suffix_tree() -> Any | None:
    """Returns arctic-inference's class, if the environment names its compiled module."""
    path = os.environ.get("SUFFIX_TREE")
    return _loaded(path) if path else None


@cache
def _loaded(path: str) -> Any:
    """Loads the module once, because its types can be registered only once."""
    spec = importlib.util.spec_from_file_location("_C", path)
    assert spec is not None, f"SUFFIX_TREE={path} is no extension module"
    assert spec.loader is not None, f"SUFFIX_TREE={path} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SuffixTree


# ---- ours ----------------------------------------------------------------------------------------


def replayed_as_often(
    history: AnswerHistory, answers: Sequence[Trajectory], per_token: float
) -> Replayed:
    """Our drafts with as many tokens verified per token gained as the reference, as nearly as
    possible: drafts that are never cut may verify fewer, those of the surest tokens alone more.
    """
    low, high = 0.0, 1.0
    tried = [replayed(history, answers, low)]
    for _ in range(HALVINGS if tried[0].per_token > per_token else 0):
        least = (low + high) / 2
        tried.append(replayed(history, answers, least))
        low, high = (least, high) if tried[-1].per_token > per_token else (low, least)
    return min(tried, key=lambda one: abs(one.per_token - per_token))


def replayed(history: AnswerHistory, answers: Sequence[Trajectory], least: float) -> Replayed:
    """Cuts drafts before the first token at which the probability that all are accepted is below
    `least`.
    """
    chances, total = AcceptanceCurve(MOST), Replayed()
    for answer in answers:
        tokens = answer.tokens.tolist()
        first = at = int((answer.sources == PROMPT).sum())
        key, agreement = prompt_key(answer.tokens, answer.sources), HistoryAgreement()
        passes = guessed = right = 0
        while at < len(tokens):
            newest = tokens[max(0, at - history.context) : at]
            most = min(MOST, len(tokens) - at - 1)
            draft = history.draft(key, newest, most)
            coming = agreement.start_draft(draft, history.context)[:most]
            length = DraftRow(len(coming), 0.0, chances.odds(agreement.known)).worth_while(least)
            same = equal(coming[:length], tokens[at:])
            chances.add(agreement.known, length, same)
            agreement.end_draft(length, same)
            passes, guessed, right, at = passes + 1, guessed + length, right + same, at + same + 1
        total += Replayed(len(tokens) - first, passes, guessed, right)
    return total


# ---- vLLM's --------------------------------------------------------------------------------------


def replayed_by_tree(
    tree: Any, before: Sequence[Trajectory], answers: Sequence[Trajectory]
) -> Replayed:
    """vLLM's drafts: earlier answers without their prompts in one tree, the sequence in another."""
    everything, total = tree(DEPTH), Replayed()
    for number, answer in enumerate(before):
        first = int((answer.sources == PROMPT).sum())
        everything.extend_ndarray(number, answer.tokens[first:].astype(np.int32))
    for answer in answers:
        total += _answered(tree, everything, answer)
    return total


def _answered(tree: Any, everything: Any, answer: Trajectory) -> Replayed:
    tokens = answer.tokens.tolist()
    first = at = int((answer.sources == PROMPT).sum())
    own = tree(DEPTH)
    own.extend(0, tokens[:first])
    passes = guessed = right = 0
    while at < len(tokens):
        most, context = min(DEPTH, len(tokens) - at - 1), tokens[max(0, at - DEPTH) : at]
        asked = (context, most, FACTOR, 0.0, LEAST_CHANCE, False)
        mine, shared = own.speculate(*asked), everything.speculate(*asked)
        draft: list[int] = (mine if mine.score >= shared.score else shared).token_ids
        draft = draft[: max(0, most)]
        same = equal(draft, tokens[at:])
        own.extend(0, tokens[at : at + same + 1])
        passes, guessed, right, at = passes + 1, guessed + len(draft), right + same, at + same + 1
    return Replayed(len(tokens) - first, passes, guessed, right)


def equal(guessed: Sequence[int], came: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    count = 0
    while count < len(guessed) and guessed[count] == came[count]:
        count += 1
    return count
