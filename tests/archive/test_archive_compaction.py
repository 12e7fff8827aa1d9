"""Merged files: their names, what readers take of a listing, and what is merged with what."""

from rollstream.storage.archive.file_names import (
    ArchiveFile,
    archive_key,
    current_files,
    merged_key,
    parse_archive_key,
)

DAY_MS = 1_763_683_200_000


def plain(first: int, size: int = 10, day: int = 0, partition: int = 0) -> ArchiveFile:
    key = archive_key("ledger", "tiny", partition, first, DAY_MS + day * 86_400_000)
    found = parse_archive_key(key, size)
    assert found is not None
    return found


def merged(first: int, last: int, size: int = 20, partition: int = 0) -> ArchiveFile:
    found = parse_archive_key(merged_key(plain(first, partition=partition), last), size)
    assert found is not None
    assert (found.first, found.last, found.partition) == (first, last, partition)
    return found


def test_a_merged_file_takes_the_place_of_all_files_that_begin_in_it() -> None:
    """The narrower merged file too, and one that an archiver wrote again and longer."""
    others = [plain(500), plain(0, partition=1), merged(100, 399, partition=1)]
    inside = [plain(0), plain(100), merged(0, 199), plain(499)]
    widest = merged(0, 499)
    listed = sorted([*others, *inside, widest], key=lambda file: file.key)
    found = current_files([None, *listed])
    assert found == [widest, plain(500), plain(0, partition=1), merged(100, 399, partition=1)]
    assert current_files([*others, *inside])[:2] == [merged(0, 199), plain(499)]
