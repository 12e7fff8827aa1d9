"""Finds the archived files of one run, checks them, and makes them readable for DuckDB.

Files of a `file:` store are read in place; files of other stores are fetched into a bounded cache
(`fetched.py`). First and last offsets come from file names and footers, without reading data. A
damaged file raises `CorruptObject`, or is left out if `skip_corrupt` is set.
"""
# duckdb ships few types
# pyright: reportUnknownMemberType=false

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import duckdb

from rollstream.analysis.coverage import ReadableFile, overlapping
from rollstream.analysis.fetched import ArchiveCache
from rollstream.analysis.locate import RunLocation
from rollstream.storage.archive.names import ARCHIVE_PREFIX, ArchiveFile, parse_archive_key
from rollstream.storage.stores.connect import open_store
from rollstream.errors import ConfigurationError, CorruptObject

_PATH = re.compile(r"""(Invalid Input Error|IO Error): |Failed to read file "[^"]*": | '/[^']*'""")
_FOOTER_KEYS = ("last", "schema", "fence")


@dataclass(slots=True)
class ArchivedFiles:
    """The archived files of one run; `warn` receives messages for the user."""

    place: RunLocation
    connection: duckdb.DuckDBPyConnection
    skip_corrupt: bool
    warn: Callable[[str], None]
    bad: set[str] = field(default_factory=set[str])
    """Paths of damaged files that are left out."""
    _files: list[ArchiveFile] | None = None
    _fetched: ArchiveCache | None = None

    def run(self) -> str:
        """Returns the run's name: the configured one, or the archive's only run."""
        if self.place.run is not None:
            return self.place.run
        runs = sorted({file.run for file in self._all()})
        if len(runs) > 1:
            raise ConfigurationError(
                f"{self.place.name} holds the archives of {len(runs)} runs ({', '.join(runs[:8])}):"
                " name one with --name NAME"
            )
        return runs[0] if runs else "run"

    def held(self, topic: str) -> list[ReadableFile]:
        """Returns the topic's readable files."""
        if self.skip_corrupt:
            self.check(topic)
        return self._held(topic)

    def _held(self, topic: str) -> list[ReadableFile]:
        run = self.run()
        files = [file for file in self._all() if (file.topic, file.run) == (topic, run)]
        if self._fetched is None or not files:
            return []
        paths = self._fetched.paths(files)
        footers = self._footers(paths)
        held = [
            _readable_file(path, file, footers[path])
            for file, path in zip(files, paths, strict=True)
            if path in footers
        ]
        for one, other in overlapping(held):
            raise CorruptObject(
                f"{one.path} and {other.path} hold the same rows of {topic}: one of them was "
                "added by hand; move it out of the archive"
            )
        return held

    def refresh(self) -> None:
        """Forget the listing: the next use lists the store again."""
        self._files = None

    def check(self, topic: str) -> None:
        """Read all files of the topic completely; a damaged one is raised, or left out from
        now on.
        """
        for one in self._held(topic):
            try:
                self.connection.execute(
                    f"SELECT bit_xor(hash(row)) FROM read_parquet({sql_literal(one.path)}) AS row"
                ).fetchall()
            except duckdb.Error as error:
                self._found_bad(one.path, error)

    def _all(self) -> list[ArchiveFile]:
        if not self.place.has_store:
            return []
        if self._files is None:
            store = open_store(self.place.store)
            self._fetched = ArchiveCache(store, self.place.store, self.warn)
            found = (parse_archive_key(entry.key, entry.bytes) for entry in store.list(ARCHIVE_PREFIX))
            self._files = [file for file in found if file is not None]
        return self._files

    def _footers(self, paths: Sequence[str]) -> dict[str, dict[str, str]]:
        """Returns the archive's footer entries of each readable file."""
        wanted = [path for path in paths if path not in self.bad]
        try:
            return self._read_footers(wanted) if wanted else {}
        except duckdb.Error:
            pass  # read them one by one to find the damaged one
        found: dict[str, dict[str, str]] = {}
        for path in wanted:
            try:
                found |= self._read_footers([path])
            except duckdb.Error as error:
                self._found_bad(path, error)
        return found

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
        reason = _PATH.sub("", str(error).splitlines()[0])
        if not self.skip_corrupt:
            raise CorruptObject(
                f"archived file {path} is damaged ({reason}); restore it from a copy of the "
                "store, or continue without its rows with --skip-corrupt"
            ) from error
        self.bad.add(path)
        self.warn(f"left out: {path} is damaged ({reason}); the result lacks its rows")


def sql_literal(text: str) -> str:
    """Returns text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def _readable_file(path: str, file: ArchiveFile, footer: dict[str, str]) -> ReadableFile:
    term, _, sequence = footer["fence"].partition(":")
    return ReadableFile(
        path, file.partition, file.first, int(footer["last"]), int(footer["schema"]), int(term),
        int(sequence),
    )  # fmt: skip
