"""Which files are merged with which, and which files of a listing hold the rows."""

from itertools import combinations
from math import log2
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, strategies as st

from rollstream.storage.archive.file_names import (
    ArchiveFile,
    archive_key,
    current_files,
    merged_key,
    parse_archive_key,
)
from rollstream.storage.archive.merging import Merge, plan_merges

DAY_MS = 1_763_683_200_000


def listed(key: str, size: int) -> ArchiveFile:
    found = parse_archive_key(key, size)
    assert found is not None
    return found


def plain(first: int, size: int = 10, day: int = 0, partition: int = 0) -> ArchiveFile:
    return listed(archive_key("ledger", "tiny", partition, first, DAY_MS + day * 86_400_000), size)


def merged(first: int, last: int, size: int = 20, partition: int = 0) -> ArchiveFile:
    found = listed(merged_key(plain(first, partition=partition), last), size)
    assert (found.first, found.last, found.partition) == (first, last, partition)
    return found


def test_a_merged_file_takes_the_place_of_all_files_that_begin_in_it() -> None:
    """The narrower merged file too, and one that an archiver wrote again and longer."""
    others = [plain(500), plain(0, partition=1), merged(100, 399, partition=1)]
    inside = [plain(0), plain(100), merged(0, 199), plain(499)]
    widest = merged(0, 499)
    found = current_files([None, *sorted([*others, *inside, widest], key=_key)])
    assert found == [widest, plain(500), plain(0, partition=1), merged(100, 399, partition=1)]
    assert current_files([*others, *inside])[:2] == [merged(0, 199), plain(499)]


def _key(file: ArchiveFile) -> str:
    return file.key


def after(files: list[ArchiveFile], merges: list[Merge]) -> list[ArchiveFile]:
    """The listing after these merges, of which no file was deleted yet."""
    sizes = [sum(file.bytes for file in merge.files) for merge in merges]
    return [*files, *(listed(m.key, size) for m, size in zip(merges, sizes, strict=True))]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.booleans()), max_size=40),
    st.data(),
)
def test_merged_files_of_any_planner_are_disjoint_or_nested(
    steps: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    """From listings of any age, with any target."""
    chain: list[ArchiveFile] = []
    first = day = 0
    for rows, size, is_next_day in steps:
        chain.append(plain(first, size, day))
        first, day = first + rows, day + is_next_day
    found: list[ArchiveFile] = []
    for _ in range(data.draw(st.integers(1, 5))):
        known = chain[: data.draw(st.integers(0, len(chain)))] + [
            file for file in found if data.draw(st.booleans())
        ]
        merges = plan_merges(current_files(known), data.draw(st.integers(2, 400)), 3)
        assert all(len(merge.files) > 1 for merge in merges)
        assert all(merge.files[0].date == file.date for merge in merges for file in merge.files)
        found = after(found, merges)
    for one, other in combinations({(f.first, f.last or 0) for f in found}, 2):
        assert one[1] < other[0] or other[1] < one[0] or _within(one, other) or _within(other, one)


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def test_a_long_run_has_few_files() -> None:
    """At most 16 and a few more of the newest day; those of a day that is over, by its bytes."""
    files: list[ArchiveFile] = []
    counts: list[int] = []
    for number in range(3000):
        files.append(plain(7 * number, 10, number // 1000))
        files = current_files(after(files, plan_merges(files, 4000, 16)))
        counts.append(len(files))
    assert max(counts[900:1000]) <= 16 + 6  # two of 4 000 bytes at most are full
    assert [sum(f.date == d for f in files) <= 6 for d in sorted({f.date for f in files})[:2]]
    assert max(counts[2000:]) - max(counts[1000:2000]) <= 6
    assert not plan_merges(files, 4000, 16)
    assert sum(file.bytes for file in files) == 30_000


@pytest.mark.parametrize("rows", [3, 70, 140, 1000])
def test_the_files_of_a_day_stay_level_and_a_row_is_copied_a_few_times(rows: int) -> None:
    """5 000 files of one day, some of them full in the end: no more files in the last quarter than
    in the second, beyond those that are full; a row is copied once per doubling at most.
    """
    files: list[ArchiveFile] = []
    counts: list[int] = []
    draw, first, copied = Random(1), 0, 0
    for _ in range(5000):
        size = max(1, round(draw.gauss(rows, rows / 4)))
        files.append(plain(first, 100 * size))
        first += size
        merges = plan_merges(files, 128 << 20, 16)
        copied += sum(file.bytes for merge in merges for file in merge.files)
        files = current_files(after(files, merges))
        counts.append(len(files))
    full = 100 * first // (128 << 20)
    assert max(counts) <= 16
    assert fmean(counts[3750:]) - full <= 1.1 * fmean(counts[1250:2500])
    assert copied <= 100 * first * log2(5000 / 16)
