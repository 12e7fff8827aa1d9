"""The kind of stores in a local folder (`FileKind`)."""

from typing import Literal

from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.file import FileStore
from rollstream.storage.stores.kind import NamedServer


class FileKind:
    form = "file:FOLDER"

    def check(self, url: str) -> None:
        """Any path may be made into a store."""

    def identity(self, url: str) -> str:
        return url

    def named_server(self, url: str) -> NamedServer | None:
        return None

    def open(self, url: str, sync: Literal["normal", "full"], deadline_s: float) -> ObjectStore:
        del deadline_s  # there is no server
        return FileStore(url.removeprefix("file:").removeprefix("//"), sync)
