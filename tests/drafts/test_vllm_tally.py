"""The counts that vLLM's worker writes and the rollout reads, through shared memory."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.engines.base import DraftStats
from rollstream.producers.engines.vllm.local.proposer_speculation import (
    DraftCounters,
    ProposerSpeculation,
    StayDrafts,
    SteppedRequest,
    open_draft_counters,
)
from rollstream.streams.values import Drafts, accepted_mask, accepted_tokens, join_drafts
from testbed.waiting import WAIT_S
from tests.drafts.test_vllm_guesses import ANSWER, PROMPT, VOCABULARY, history_of, verified

SOME = Drafts((1, 3, 2), 2, 5, 2, 1, 0.5)


@pytest.fixture
def both() -> Iterator[tuple[DraftCounters, DraftCounters]]:
    """The worker's side, and the rollout's side."""
    with open_draft_counters(3) as (mine, path):
        yield DraftCounters(path), mine


def test_what_one_process_writes_another_reads_and_keeps_when_the_file_is_gone() -> None:
    program = (
        "import sys\n"
        "from rollstream.producers.engines.base import DraftStats\n"
        "from rollstream.producers.engines.vllm.local.proposer_speculation import DraftCounters\n"
        "from rollstream.streams.values import Drafts\n"
        "tally = DraftCounters(sys.argv[1])\n"
        "tally.write(DraftStats(passes=3, accepted=7, lookup_s=0.25))\n"
        "tally.add(2, 9, Drafts((1, 3, 2), 2, 5, 2, 1, 0.5))\n"
    )
    with open_draft_counters(3) as (mine, path):
        subprocess.run([sys.executable, "-c", program, path], check=True, timeout=WAIT_S)
    assert mine.stats() == DraftStats(passes=3, accepted=7, lookup_s=0.25)
    assert mine.of(2, 9) == [3, 5, 2, 1, 0.5]


def test_a_place_is_its_newest_stay_and_adds_up_for_that(
    both: tuple[DraftCounters, DraftCounters],
) -> None:
    worker, rollout = both
    for _ in range(2):
        worker.add(1, 4, SOME)
    assert rollout.of(1, 4) == [6, 10, 4, 2, 1.0]
    assert rollout.of(1, 5) == [0] * 5, "it has not begun"
    worker.add(1, 5, SOME)
    assert rollout.of(1, 5) == [3, 5, 2, 1, 0.5]
    assert rollout.of(1, 4) == [0] * 5
    assert rollout.of(0, 0) == rollout.of(2, 0) == [0] * 5


def test_counts_are_reported_once_also_those_that_are_ahead_of_the_tokens(
    both: tuple[DraftCounters, DraftCounters],
) -> None:
    """A worker in another process is a step or two ahead of the counts that were read."""
    worker, rollout = both
    one = StayDrafts(rollout, 0, 1)
    worker.add(0, 1, Drafts((0, 2, 1), 1, 4, 1, 1, 0.1))
    worker.add(0, 1, Drafts((0, 1, 1), 1, 4, 1, 0, 0.1))
    one.gained(3, ended=False)
    assert one.take() == Drafts((0, 2, 1), 1, 8, 2, 1, pytest.approx(0.2))  # pyright: ignore[reportArgumentType]
    one.gained(2, ended=True)
    assert one.take() == Drafts((0, 1, 1), 1, 0, 0, 0, 0.0)


@pytest.mark.parametrize(("right", "runs"), [(2, (0, 2)), (1, (0, 1, 1))])
def test_a_stop_token_is_marked_where_it_was_drafted(
    both: tuple[DraftCounters, DraftCounters], right: int, runs: tuple[int, ...]
) -> None:
    worker, rollout = both
    one = StayDrafts(rollout, 0, 1)
    worker.add(0, 1, Drafts((0, right), 1, 3, 1, 1, 0.0))
    one.gained(2, ended=True)
    assert one.take().runs == runs


def test_a_whole_answer_is_marked_token_by_token_as_it_was_drafted(
    both: tuple[DraftCounters, DraftCounters],
) -> None:
    """Preempted in the middle, so that its row restarts and a draft is dropped."""
    worker, rollout = both
    whole = [1, 2, 3, *ANSWER]
    history = history_of([token if i % 9 else 999 for i, token in enumerate(whole)])
    guesses = ProposerSpeculation(history, DraftGate(forced=True), VOCABULARY, counters=worker)
    one, known, draft, wanted = StayDrafts(rollout, 1, 1), whole[:3], list[int](), list[bool]()
    parts: list[tuple[int, Drafts]] = []
    while len(known) < len(whole):
        if len(parts) == 5:
            guesses.step([])
            draft = []
        new = verified(whole, known, draft)
        known = known + new
        wanted += [True] * (len(new) - 1) + [False]
        tokens, room = np.array(known, np.int32), len(whole) - len(known)
        (draft,) = guesses.step([SteppedRequest("a", PROMPT, 0, draft, new, tokens, room, 1, 1)])
        one.gained(len(new), ended=len(known) == len(whole))
        parts.append((len(new), one.take()))
    joined = join_drafts(parts)
    assert joined is not None
    assert accepted_mask(joined, len(wanted)).tolist() == wanted
    stats = rollout.stats()
    assert accepted_tokens(joined) == stats.accepted > 20
    assert (joined.guessed, joined.asked, joined.found) == (
        stats.proposed,
        stats.asked,
        stats.found,
    )
    assert 0 < joined.lookup_s <= stats.lookup_s + 1e-9  # the last look-up is in no part
    assert stats == guesses.stats()
