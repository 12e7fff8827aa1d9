"""The plans that keep rows packed and sorted by length class."""

from hypothesis import given, strategies as st

from rollstream.producers.engines.torch.rows import (
    RowLayout,
    RowSegment,
    length_classes,
    row_segments,
)

SLOTS = 8


def apply(rows: list[str | None], moves: list[tuple[int, int]]) -> None:
    for source, target in moves:
        rows[target], rows[source] = rows[source], None


@given(st.lists(st.tuples(st.sampled_from("iirp"), st.integers(0, 7), st.integers(0, 2))))
def test_rows_stay_packed_and_regions_together(actions: list[tuple[str, int, int]]) -> None:
    order = RowLayout((10, 20), SLOTS)
    rows: list[str | None] = [None] * (SLOTS + 1)
    region_of: dict[str | None, int] = {}
    for number, (action, pick, region) in enumerate(actions):
        used = len(region_of)
        if action == "i" and used < SLOTS:
            row, moves = order.insert(region)
            apply(rows, moves)
            assert rows[row] is None
            rows[row] = f"s{number}"
            region_of[f"s{number}"] = region
        elif action == "r" and used:
            name = rows[pick % used]
            rows[pick % used] = None
            apply(rows, order.remove(pick % used))
            del region_of[name]
        elif action == "p" and used and region_of[rows[pick % used]]:
            name = rows[pick % used]
            # As in the batch: the swapped row keeps its position in the region.
            moves = order.promote(pick % used, region_of[name])
            held = rows[:]
            for source, target in moves:
                held[target] = held[source]
            rows[:SLOTS] = held[:SLOTS]
            region_of[name] -= 1
        found = [region_of[name] for name in rows[: len(region_of)]]
        assert found == sorted(found)
        assert order.counts == [found.count(each) for each in range(3)]


def test_regions_join_where_padding_is_cheaper_than_a_call() -> None:
    assert row_segments([2, 3, 0, 10], [0, 10, 0, 90], 100) == (
        RowSegment(0, 5, 0),
        RowSegment(5, 15, 90),
    )
    assert row_segments([1, 4], [50, 20], 10_000) == (RowSegment(0, 5, 20),)
    assert row_segments([4, 0, 4], [50, 0, 50], 100) == (RowSegment(0, 8, 50),)
    assert row_segments([0, 0], [0, 0], 10) == ()


def test_length_classes_grow_up_to_the_context() -> None:
    assert length_classes(512) == (48, 144, 432)
    assert length_classes(48) == ()


def test_a_row_belongs_to_the_shortest_class_that_holds_it() -> None:
    order = RowLayout((48, 144), 4)
    assert [order.region(length) for length in (0, 48, 49, 144, 145)] == [2, 2, 1, 1, 0]
