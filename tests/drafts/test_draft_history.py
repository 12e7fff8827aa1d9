"""A history drafts the tokens that followed the best occurrence, within its bounds."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rollstream.producers.drafts.history import (
    AnswerHistory,
    HistoryAnswer,
    prompt_key,
    reward_priority,
)
from rollstream.producers.drafts.index import NgramTable, ngram_key, ngram_keys, ngram_sums
from rollstream.producers.drafts.shared_memory import PROBES, HistoryLayout, allocate_memory
from rollstream.streams.records import ENVIRONMENT, GENERATED, PROMPT
from rollstream.streams.values import Tokens

LENGTHS = (3, 4, 5, 6, 7)


def tokens(*values: int) -> Tokens:
    return np.array(values, np.uint32)


def contains(sequence: list[int], part: list[int]) -> bool:
    return any(sequence[i : i + len(part)] == part for i in range(len(sequence) - len(part) + 1))


SEQUENCES = st.lists(
    st.tuples(
        st.integers(0, 2), st.lists(st.integers(0, 3), min_size=4, max_size=40), st.floats(-2, 2)
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.sampled_from(["priority", "newest", "count"]), st.integers(0, 2**32))
def test_a_draft_is_a_true_continuation_of_what_was_inserted(
    inserted: list[tuple[int, list[int], float]], choice: str, seed: int
) -> None:
    """With any evictions meanwhile: 64 tokens are kept, and up to 1 200 inserted."""
    history = AnswerHistory(64, LENGTHS, choice)  # pyright: ignore[reportArgumentType]
    drawn = np.random.default_rng(seed)
    for group, (prompt, values, reward) in enumerate(inserted):
        history.insert(prompt, group, tokens(*values), len(values) - 1, reward)
        newest = drawn.integers(0, 4, 9).tolist() if group % 2 else values[:-1]
        draft = history.draft(prompt, newest, 5)
        assert len(draft.tokens) <= 5
        if draft.matched:
            assert draft.matched in LENGTHS
            found = [*newest[-draft.matched :], *draft.tokens]
            mine = [v for p, v, _ in inserted[: group + 1] if p == prompt]
            assert any(contains(each, found) for each in mine)


def test_the_longest_recognised_context_decides() -> None:
    history = AnswerHistory(1000)
    history.insert(1, 0, tokens(9, 1, 2, 3, 4, 5), 5)
    history.insert(1, 0, tokens(8, 7, 2, 3, 4, 6), 5)
    assert list(history.draft(1, [1, 2, 3, 4], 9).tokens) == [5]
    assert list(history.draft(1, [7, 2, 3, 4], 9).tokens) == [6]
    assert history.draft(1, [1, 2, 3, 4], 9).matched == 4


def test_a_short_context_reaches_less_far() -> None:
    history = AnswerHistory(1000, reach=2)
    history.insert(1, 0, np.arange(40, dtype=np.uint32), 39)
    assert list(history.draft(1, [9, 9, 2, 3, 4], 32).tokens) == [5, 6, 7, 8, 9, 10]
    assert len(history.draft(1, list(range(7)), 32).tokens) == 14
    assert len(history.draft(1, list(range(7)), 3).tokens) == 3


def test_another_prompt_and_an_unknown_context_give_nothing() -> None:
    history = AnswerHistory(1000)
    history.insert(1, 0, tokens(1, 2, 3, 4, 5), 4)
    assert not history.draft(2, [1, 2, 3], 4).tokens
    assert not history.draft(1, [2, 2, 3], 4).tokens
    assert not history.draft(1, [2, 3], 4).tokens  # fewer than the shortest context
    assert history.draft(1, [], 4).matched == 0


@pytest.mark.parametrize(
    ("choice", "wanted"), [("priority", [4, 4]), ("newest", [6, 6]), ("count", [5, 5])]
)
def test_at_a_branch_the_choice_decides(choice: str, wanted: list[int]) -> None:
    history = AnswerHistory(1000, choice=choice)  # pyright: ignore[reportArgumentType]
    for last, reward in [(4, 1.0), (5, 0.0), (5, 0.0), (6, 0.0)]:
        history.insert(1, 0, tokens(1, 2, 3, last, last), 2, reward)
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == wanted


def test_a_later_pass_over_a_prompt_comes_before_a_better_reward() -> None:
    history = AnswerHistory(1000)
    history.insert(1, 10, tokens(1, 2, 3, 4), 1, reward=0.9)
    history.insert(1, 11, tokens(1, 2, 3, 5), 1, reward=-1.0)
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == [5]
    history.insert(1, 10, tokens(1, 2, 3, 6), 1, reward=-2.0)  # late, of the earlier group
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == [5]


def test_a_late_reward_ranks_an_answer_again() -> None:
    """Up or down, with other answers inserted before or after it."""
    history = AnswerHistory(1000)
    for name, last in [("a", 4), ("b", 5), ("c", 6)]:
        answer = HistoryAnswer(1, 0, tokens(1, 2, 3, last, last), 2, name=name)
        history.insert_all([answer])
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == [6, 6]  # the last of equal ones
    assert history.add_reward("a", 1.0)
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == [4, 4]
    assert history.add_reward("a", -9.0) is False  # the first one counted
    assert history.add_reward("b", 0.5)
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == [4, 4]
    assert history.add_reward("c", 2.0)
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == [6, 6]
    history.insert(1, 0, tokens(1, 2, 3, 7), 1, reward=1.5)
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == [6, 6]


def test_an_answer_that_was_judged_badly_gives_way_to_the_next() -> None:
    history = AnswerHistory(1000)
    history.insert_all([HistoryAnswer(1, 0, tokens(1, 2, 3, 4), 1, name="a")])
    assert history.add_reward("a", -5.0)
    history.insert(1, 0, tokens(1, 2, 3, 5), 1, reward=-1.0)
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == [5]


def test_a_late_reward_of_an_evicted_answer_changes_nothing() -> None:
    history = AnswerHistory(64)
    history.insert_all([HistoryAnswer(1, 0, tokens(1, 2, 3, 4, 5), 2, name="a")])
    history.insert(2, 1, np.arange(100, 160, dtype=np.uint32), 59)
    history.insert(2, 2, np.arange(200, 260, dtype=np.uint32), 59)
    assert history.add_reward("a", 9.0)
    assert not history.draft(1, [1, 2, 3], 8).tokens
    assert not history.add_reward("never heard of", 9.0)


def test_answers_that_wait_for_a_reward_are_bounded() -> None:
    history = AnswerHistory(64)
    for number in range(100):
        history.insert_all([HistoryAnswer(1, 0, tokens(1, 2, 3, 4), 1, name=f"a{number}")])
    assert history.bytes <= 400 * 64 + 16 * 1024
    assert not history.add_reward("a0", 1.0)
    assert history.add_reward("a99", 1.0)


def test_what_is_finished_comes_before_what_runs_in_the_same_pass() -> None:
    history = AnswerHistory(1000)
    history.insert(1, 10, tokens(1, 2, 3, 4), 1, reward=1.0)
    history.insert(1, 11, tokens(1, 2, 3, 5), 1, reward=-1.0)
    history.add_running(1, 11, tokens(1, 2, 3, 6), 1)
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == [5]
    history.add_running(1, 12, tokens(1, 2, 3, 7), 1)  # the next pass
    assert list(history.draft(1, [1, 2, 3], 8).tokens) == [7]


def test_a_sequence_that_still_runs_is_drafted_from() -> None:
    """Seer: siblings of the group; chunk by chunk, each with the few tokens before it."""
    history, answer = AnswerHistory(1000), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    history.add_running(1, 0, tokens(*answer[:6]), 4)
    history.add_running(1, 0, tokens(*answer), 6)
    assert list(history.draft(1, answer[:3], 9).tokens) == answer[3:6]
    assert list(history.draft(1, answer[:6], 9).tokens) == answer[6:]


def test_memory_is_bounded_and_the_newest_tokens_are_kept() -> None:
    history = AnswerHistory(4096)
    drawn = np.random.default_rng(0)
    for group in range(400):
        newest = drawn.integers(0, 50_000, 100).astype(np.uint32)
        history.insert(group, group, newest, 99)
        assert history.bytes <= 400 * 4096
        for start in range(10, 90, 7):
            draft = history.draft(group, newest[:start].tolist(), 4)
            assert list(draft.tokens) == newest[start : start + 4].tolist()
    recent = history.draft(390, [], 4)
    assert not recent.tokens


def test_a_sequence_longer_than_the_history_keeps_its_end() -> None:
    history = AnswerHistory(64)
    many = np.arange(1000, dtype=np.uint32)
    history.insert(1, 0, many, 999)
    assert list(history.draft(1, [990, 991, 992], 3).tokens) == [993, 994, 995]
    assert not history.draft(1, [90, 91, 92], 3).tokens


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**32 - 2), min_size=4, max_size=30),
    st.integers(1, 8),
)
def test_keys_of_all_positions_equal_those_of_each(
    prompt: int, values: list[int], first: int
) -> None:
    other = tokens(7, 7, 8, 1, 2)  # a sequence before it, of another prompt
    count, before = len(values), len(other)
    prompts = np.array([prompt ^ 1] * before + [prompt] * count, np.uint64)
    places = np.array([*range(before), *[i if i >= first else -1 for i in range(count)]])
    many = ngram_keys(prompts, np.concatenate((other, tokens(*values))), places, LENGTHS)
    for index, length in enumerate(LENGTHS):
        keys, at = many[index]
        mine = {int(p) - before: int(k) for k, p in zip(keys, at, strict=True) if p >= before}
        assert sorted(mine) == list(range(max(first, length), count))
        for place, key in mine.items():
            total = ngram_sums(values[:place], LENGTHS)[index]
            assert ngram_key(prompt, total, LENGTHS[index]) == key


def table_of(tokens_max: int) -> NgramTable:
    return NgramTable(allocate_memory(HistoryLayout(tokens_max)))


def place_of(table: NgramTable, key: int) -> int:
    exists, at = table.find(np.array([key], np.uint64))
    return int(table.places[at[0]]) if exists[0] else -1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=40), max_size=12))
def test_a_table_that_is_not_full_finds_the_newest_place_of_every_key(
    batches: list[list[int]],
) -> None:
    table, wanted, place = table_of(650), {}, 1
    for batch in batches:
        keys = np.array(batch, np.uint64) << np.uint64(3)  # neighbours share their slots
        places = np.arange(place, place + len(batch))
        exists, at = table.find(keys)
        ranks = np.zeros(len(keys), np.float32)
        table.write(at[exists], places[exists], ranks[exists])
        table.add(keys[~exists], places[~exists], ranks[~exists], 0)
        wanted.update(zip(keys.tolist(), places.tolist(), strict=True))
        place += len(batch)
    assert {key: place_of(table, key) for key in wanted} == wanted
    assert place_of(table, 5) == -1


def test_a_full_table_lets_the_oldest_places_go() -> None:
    table = table_of(16)
    for place in range(1, 200):
        key = np.array([place * table.slots], np.uint64)  # all of them point to the same slot
        table.add(key, np.array([place]), np.zeros(1, np.float32), 0)
    kept = [place for place in range(1, 200) if place_of(table, place * table.slots) == place]
    assert kept == list(range(200 - PROBES, 200))


def test_a_prompt_ends_where_something_else_begins() -> None:
    start = tokens(5, 6, 7)
    key = prompt_key(start, np.full(3, PROMPT, np.uint8))
    longer = np.array([PROMPT] * 3 + [GENERATED, ENVIRONMENT, PROMPT], np.uint8)
    assert prompt_key(tokens(5, 6, 7, 1, 2, 3), longer) == key
    assert prompt_key(tokens(5, 6), np.full(2, PROMPT, np.uint8)) != key


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_priority_rises_with_the_reward(a: float, b: float) -> None:
    assert 0 <= reward_priority(a) <= 1
    assert (reward_priority(a) <= reward_priority(b)) == (a <= b) or reward_priority(
        a
    ) == reward_priority(b)


@settings(max_examples=40, deadline=None)
@given(SEQUENCES, st.sampled_from(["priority", "newest", "count"]))
def test_answers_inserted_together_are_those_inserted_one_by_one(
    inserted: list[tuple[int, list[int], float]], choice: str
) -> None:
    """The results agree except for the choice among equally good occurrences: the newest before the
    whole batch.
    """
    together, apart = AnswerHistory(4096, choice=choice), AnswerHistory(4096, choice=choice)  # pyright: ignore[reportArgumentType]
    rewards = np.arange(len(inserted)) / 10  # all different
    answers = [
        HistoryAnswer(prompt, 0, tokens(*values), len(values) - 1, float(reward))
        for (prompt, values, _), reward in zip(inserted, rewards, strict=True)
    ]
    together.insert_all(answers[::-1] if choice == "priority" else answers)
    for answer in answers:
        apart.insert(answer.prompt, 0, answer.tokens, answer.fresh, answer.reward)
    for prompt, values, _ in inserted:
        for end in range(3, len(values)):
            one, other = (h.draft(prompt, values[:end], 6) for h in (together, apart))
            assert (list(one.tokens), one.matched) == (list(other.tokens), other.matched)
