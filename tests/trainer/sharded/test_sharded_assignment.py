"""The assignment of training and memory to ranks: pure, complete, balanced."""

from itertools import pairwise

from hypothesis import given, strategies as st

from rollstream.consumers.trainer.sharded.rank_plan import owners, rounds, rows_per_rank, slice_of

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
