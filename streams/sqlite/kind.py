"""The kind of logs in a local folder; SQLite is imported only to open one: a command that only
reads a URL starts fast.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollstream.errors import ConfigurationError
from rollstream.streams.kind import LogContents, NamedBrokers

if TYPE_CHECKING:
    from rollstream.contained_folder import ContainedFolder
    from rollstream.streams.bus import Bus


class SqliteKind:
    form = "sqlite:FOLDER"

    def check(self, url: str) -> None:
        """Any path may be made into a log."""

    def identity(self, url: str) -> str:
        return url

    def folder(self, url: str) -> Path | None:
        return _folder(url)

    def named_brokers(self, url: str) -> NamedBrokers | None:
        return None

    def function(self, url: str) -> str:
        return ""

    def check_reachable(self, url: str, wait_s: float) -> None:
        """A folder has no server."""

    def check_client(self, url: str) -> None:
        from rollstream.streams.sqlite.bus import network_refusal

        if refusal := network_refusal(_folder(url)):
            raise ConfigurationError(f"{refusal} (--run DIR or bus names one)")

    def open(self, url: str, clock: Callable[[], float], sync: Literal["normal", "full"]) -> "Bus":
        from rollstream.streams.sqlite.bus import SqliteBus

        return SqliteBus(_folder(url), clock, sync=sync)

    def open_for_reading(self, url: str, folder: "ContainedFolder | None") -> "Bus":
        from rollstream.streams.connect import BusReader
        from rollstream.streams.sqlite.bus import SqliteBus
        from rollstream.streams.sqlite.read_only import SqliteReader

        return BusReader(SqliteBus(_folder(url))) if folder is None else SqliteReader(folder)

    def contents(self, url: str) -> LogContents:
        from rollstream.streams.sqlite.removal import folder_contents

        return folder_contents(_folder(url))

    def remove(self, url: str, contents: LogContents) -> None:
        from rollstream.streams.sqlite.removal import remove_files

        remove_files(Path(contents.where))


def _folder(url: str) -> Path:
    return Path(url.partition(":")[2])
