"""Local paths of archived files: in place for `file:` stores, else in a cache on this machine.

Archived objects never change, so cached files stay valid. The cache is bounded and evicts the least
recently used files first. A topic that is larger than the cache is refused.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from rollstream.storage.archive.names import ArchiveFile
from rollstream.storage.stores.file import FileStore
from rollstream.storage.stores.base import ObjectStore
from rollstream.errors import ConfigurationError

CACHE_BYTES = 16 << 30


class ArchiveCache:
    """A bounded LRU cache of archived files; `warn` receives a message before a download."""

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
        """Returns a local path for each file, after fetching missing ones."""
        if isinstance(self._store, FileStore):
            return [str(self._store.path(file.key)) for file in files]
        folder = self._cache / xxhash.xxh3_64_hexdigest(self._url.encode())
        wanted = {folder / file.key: file for file in files}
        total = sum(file.bytes for file in files)
        if total > self._bytes_max:
            raise ConfigurationError(
                f"the archive of {files[0].topic} has {total:,} bytes and the cache holds "
                f"{self._bytes_max:,}: copy the archive to a folder and query that"
            )
        missing = {path: file for path, file in wanted.items() if not path.exists()}
        if missing:
            size = sum(file.bytes for file in missing.values())
            self._warn(f"fetching {len(missing)} archived files, {size:,} bytes, to {folder}")
            self._make_room(size, keep=set(wanted))
        for path, file in missing.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_bytes(self._store.get(file.key))
            os.replace(partial, path)
        for path in wanted:
            os.utime(path)
        return [str(path) for path in wanted]

    def _make_room(self, size: int, keep: set[Path]) -> None:
        """Evict the least recently used files until `size` more bytes fit."""
        held = [(p, p.stat()) for p in self._cache.rglob("*") if p.is_file()]
        total = sum(stat.st_size for _, stat in held)
        for path, stat in sorted(held, key=lambda one: one[1].st_mtime):
            if total + size <= self._bytes_max:
                return
            if path not in keep:
                path.unlink(missing_ok=True)
                total -= stat.st_size


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "rollstream" / "archive"
