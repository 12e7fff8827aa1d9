"""Finds the archived files of one run for DuckDB, and the offsets that must come from the log, by
file names and footers.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import xxhash

from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing
from rollstream.look.query.locate import ARCHIVE_FOLDER, RunLocation, archived_run
from rollstream.look.query.looking import open_run_store
from rollstream.storage.archive.file_names import ArchiveFile
from rollstream.storage.archive.reading import LISTINGS_MAX, archived_files, local_path
from rollstream.storage.stores.base import ObjectStore


@dataclass(frozen=True, slots=True)
class ReadableFile:
    """Rows `first` to `last` of a partition, at local `path`. `fence` is the fence (term, sequence)
    after its last row; `schema` is the format number of its columns.
    """

    path: str
    partition: int
    first: int
    last: int
    schema: int = 0
    fence: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class OffsetGap:
    """`[start, end)` of a partition that no archived file holds; `end` None: all from `start` on.
    `fence` is the fence before `start`, (0, 0) if unknown.
    """

    partition: int
    start: int
    end: int | None
    fence: tuple[int, int] = (0, 0)


def offset_gaps(files: Iterable[ReadableFile], partitions: Iterable[int]) -> list[OffsetGap]:
    """Returns the gaps by partition; the open end of each comes last."""
    by_partition: defaultdict[int, list[ReadableFile]] = defaultdict(list)
    for file in files:
        by_partition[file.partition].append(file)
    gaps: list[OffsetGap] = []
    for partition in sorted({*by_partition, *partitions}):
        at, fence = 0, (0, 0)
        for file in sorted(by_partition[partition], key=lambda file: file.first):
            if file.first > at:
                gaps.append(OffsetGap(partition, at, file.first, fence))
            at, fence = max(at, file.last + 1), file.fence
        gaps.append(OffsetGap(partition, at, None, fence))
    return gaps


def overlapping(files: Iterable[ReadableFile]) -> list[tuple[ReadableFile, ReadableFile]]:
    """Returns pairs of files with common offsets: their rows would count twice."""
    pairs: list[tuple[ReadableFile, ReadableFile]] = []
    before: ReadableFile | None = None
    for file in sorted(files, key=lambda file: (file.partition, file.first)):
        if before and before.partition == file.partition and file.first <= before.last:
            pairs.append((before, file))
        if before is None or before.partition != file.partition or file.last > before.last:
            before = file
    return pairs


def gaps_in_words(lost: Sequence[OffsetGap]) -> str:
    """Returns at most five: `partition 0: 3 to 9, partition 2: 0 to 4`."""
    shown = [f"partition {h.partition}: {h.start} to {(h.end or 0) - 1}" for h in lost[:5]]
    return ", ".join(shown) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")


CACHE_BYTES = 16 << 30


class ArchiveCache:
    """Files in place for a `file:` store, else in a bounded LRU cache. A topic larger than the
    cache raises `ConfigurationError`.
    """

    def __init__(
        self,
        store: ObjectStore,
        url: str,
        warn: Callable[[str], None],
        cache: Path | None = None,
        bytes_max: int = CACHE_BYTES,
    ) -> None:
        self._store, self._url, self._warn = store, url, warn
        self._cache, self._bytes_max = cache or _cache_folder(), bytes_max

    def paths(self, files: Sequence[ArchiveFile]) -> list[str]:
        """Returns the paths after fetching missing ones."""
        local = [path for file in files if (path := local_path(self._store, file.key))]
        if len(local) == len(files):
            return [str(path) for path in local]
        folder = self._cache / _cached_name(self._url)
        files_by_path = {folder / file.key: file for file in files}
        total = sum(file.bytes for file in files)
        if total > self._bytes_max:
            raise ConfigurationError(
                f"the archive of {files[0].topic} has {total:,} bytes and the cache holds "
                f"{self._bytes_max:,}: copy the archive to a folder and query that"
            )
        # Archived objects never change, so cached files stay valid.
        missing = {path: file for path, file in files_by_path.items() if not path.exists()}
        if missing:
            size = sum(file.bytes for file in missing.values())
            self._warn(f"fetching {len(missing)} archived files, {size:,} bytes, to {folder}")
            self._make_room(size, keep=set(files_by_path))
        for path, file in missing.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_bytes(self._store.get(file.key))
            os.replace(partial, path)
        for path in files_by_path:
            os.utime(path)
        return [str(path) for path in files_by_path]

    def _make_room(self, size: int, keep: set[Path]) -> None:
        file_stats = [(p, p.stat()) for p in self._cache.rglob("*") if p.is_file()]
        total = sum(stat.st_size for _, stat in file_stats)
        # Least recently used files first.
        for path, stat in sorted(file_stats, key=lambda pair: pair[1].st_mtime):
            if total + size <= self._bytes_max:
                return
            if path not in keep:
                path.unlink(missing_ok=True)
                total -= stat.st_size


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "rollstream" / "archive"


def _cached_name(url: str) -> str:
    return xxhash.xxh3_64_hexdigest(url.encode())


def archive_folder(url: str) -> Path:
    """Below which archived files are read: the store's own for a `file:` store, else
    the cache's.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "file":
        return Path(rest.removeprefix("//")) / ARCHIVE_FOLDER
    return _cache_folder() / _cached_name(url)


# The kinds of errors and the paths in DuckDB's messages, which are left out of the reasons.
_PATH = re.compile(r"""(Invalid Input Error|IO Error): |Failed to read file "[^"]*": | '/[^']*'""")
_FOOTER_KEYS = ("last", "schema", "fence")


@dataclass(slots=True)
class ArchivedFiles:
    """The archived files of one run. `warn` receives messages for the user. A damaged file raises
    `CorruptObject`, or is left out if `skip_corrupt` is set.
    """

    location: RunLocation
    connection: duckdb.DuckDBPyConnection
    skip_corrupt: bool
    warn: Callable[[str], None]
    bad: set[str] = field(default_factory=set[str])
    _files: list[ArchiveFile] | None = None
    _fetched: ArchiveCache | None = None

    def run(self) -> str:
        """The configured name, or that of the archive's only run."""
        if self.location.run is not None:
            return self.location.run
        return archived_run(self.location, self._all())

    def held(self, topic: str) -> list[ReadableFile]:
        """Returns readable files. With `skip_corrupt` all of them are read first."""
        if self.skip_corrupt:
            self.check(topic)
        return self._held(topic)

    def refresh(self) -> None:
        """Lists the archive again at the next use."""
        self._files = None

    def _held(self, topic: str) -> list[ReadableFile]:
        for _ in range(LISTINGS_MAX):
            try:
                return self._listed(topic)
            except ObjectMissing:  # merged with others since the listing
                self.refresh()
        return self._listed(topic)

    def _listed(self, topic: str) -> list[ReadableFile]:
        run = self.run()
        files = [file for file in self._all() if (file.topic, file.run) == (topic, run)]
        if self._fetched is None or not files:
            return []
        paths = self._fetched.paths(files)
        footers = self._footers(paths)
        readable_files = [
            _readable_file(path, file, footers[path])
            for file, path in zip(files, paths, strict=True)
            if path in footers
        ]
        for first, other in overlapping(readable_files):
            raise CorruptObject(
                f"{first.path} and {other.path} hold the same rows of {topic}: one of them was "
                "added by hand; move it out of the archive"
            )
        return readable_files

    def check(self, topic: str) -> None:
        """Reads all files of the topic completely, to find damaged ones."""
        for file in self._held(topic):
            try:
                self.connection.execute(
                    f"SELECT bit_xor(hash(row)) FROM read_parquet({sql_literal(file.path)}) AS row"
                ).fetchall()
            except duckdb.Error as error:
                self._found_bad(file.path, error)

    def _all(self) -> list[ArchiveFile]:
        if not self.location.has_store:
            return []
        if self._files is None:
            store = open_run_store(self.location)
            self._fetched = ArchiveCache(store, self.location.store, self.warn)
            self._files = archived_files(store)
        return self._files

    def _footers(self, paths: Sequence[str]) -> dict[str, dict[str, str]]:
        good_paths = [path for path in paths if path not in self.bad]
        try:
            return self._read_footers(good_paths) if good_paths else {}
        except duckdb.Error:
            pass  # read the files one by one to find the damaged one
        footers: dict[str, dict[str, str]] = {}
        for path in good_paths:
            try:
                footers |= self._read_footers([path])
            except duckdb.Error as error:
                self._found_bad(path, error)
        return footers

    def _read_footers(self, paths: Sequence[str]) -> dict[str, dict[str, str]]:
        rows = self.connection.execute(
            "SELECT file_name, decode(key), decode(value) "
            f"FROM parquet_kv_metadata([{', '.join(map(sql_literal, paths))}]) "
            "WHERE decode(key) LIKE 'rollstream.%'"
        ).fetchall()
        footers: dict[str, dict[str, str]] = {path: {} for path in paths}
        for path, key, value in rows:
            footers[path][key.removeprefix("rollstream.")] = value
        for path, values in footers.items():
            if not values.keys() >= set(_FOOTER_KEYS):
                raise duckdb.InvalidInputException(f"{path}: not written by the archive role")
        return footers

    def _found_bad(self, path: str, error: duckdb.Error) -> None:
        if not Path(path).exists():
            raise ObjectMissing(f"{path} was merged with other files; try again") from error
        reason = _PATH.sub("", str(error).splitlines()[0])
        if not self.skip_corrupt:
            raise CorruptObject(
                f"archived file {path} is damaged ({reason}); restore it from a copy of the "
                "store, or continue without its rows with --skip-corrupt"
            ) from error
        self.bad.add(path)
        self.warn(f"left out: {path} is damaged ({reason}); the result lacks its rows")


def sql_literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _readable_file(path: str, file: ArchiveFile, footer: dict[str, str]) -> ReadableFile:
    term, _, sequence = footer["fence"].partition(":")
    return ReadableFile(
        path, file.partition, file.first, int(footer["last"]), int(footer["schema"]),
        (int(term), int(sequence)),
    )  # fmt: skip
