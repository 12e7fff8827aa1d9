"""The assignment of training and memory to ranks: pure, complete, balanced."""

from itertools import pairwise

from hypothesis import given, strategies as st

from rollstream.consumers.trainer.rank_plan import (
    divide,
    owners,
    parts_of_round,
    rounds,
    rows_per_rank,
    slice_of,
)

RANKS = st.integers(1, 9)


@given(st.integers(0, 60), RANKS)
def test_every_micro_batch_counts_once_and_every_rank_is_in_every_round(count, ranks):
    made = rounds(count, ranks)
    assert all(len(turns) == ranks for turns in made)
    counted = [turn.micro_batch for turns in made for turn in turns if turn.counts]
    assert counted == list(range(count))
    for number, turns in enumerate(made):
        for rank, turn in enumerate(turns):
            assert 0 <= turn.micro_batch < count
            assert not turn.counts or turn.micro_batch == number * ranks + rank
    assert all(turn.counts for turns in made[:-1] for turn in turns)


@given(st.integers(1, 40), st.integers(1, 16))
def test_parts_hold_each_sample_once_and_the_first_is_never_empty(samples, parts):
    cuts = divide(samples, parts)
    assert [index for start, end in cuts for index in range(start, end)] == list(range(samples))
    sizes = [end - start for start, end in cuts]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes)


def test_a_round_is_trained_whole_then_in_halves_then_in_quarters_and_never_in_more_than_samples():
    assert [parts_of_round([1, 8], shortages) for shortages in (0, 1, 2)] == [1, 2, 4]
    assert [parts_of_round([1, 3], shortages) for shortages in (0, 1, 2)] == [1, 2, 3]
    assert parts_of_round([1, 1], 2) == 1


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1 << 40), max_size=30), RANKS)
def test_owners_are_balanced_to_the_largest_tensor(sizes, ranks):
    owner = owners(sizes, ranks)
    assert owner.keys() == sizes.keys()
    loads = [sum(sizes[n] for n, rank in owner.items() if rank == r) for r in range(ranks)]
    assert sum(loads) == sum(sizes.values())
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=9), RANKS)
def test_owners_do_not_depend_on_the_order_in_which_tensors_are_named(sizes, ranks):
    turned = dict(reversed(sizes.items()))
    assert owners(sizes, ranks) == owners(turned, ranks)


@given(st.integers(0, 200), RANKS)
def test_slices_tile_a_tensor_as_torch_chunks_it(rows, ranks):
    cuts = [slice_of(rows, rank, ranks) for rank in range(ranks)]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == rows
    assert all(before[1] == after[0] for before, after in pairwise(cuts))
    assert all(end - start <= rows_per_rank(rows, ranks) for start, end in cuts)
