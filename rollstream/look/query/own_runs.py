"""Keeps, in the user's private folder, the runs that the user began on this machine with the code
that they name, and the URLs, hosts and link targets that the user named. Nothing in a run's folder
counts as the user's word.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from rollstream.private_state import read_private, write_private

IMPORT_PATH = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")  # `module:function`
URL_VARIABLES = ("ROLLSTREAM_BUS", "ROLLSTREAM_STORE")
"""With the log's and the store's URL: the user's word."""
_ID = re.compile(r"[0-9a-f]{8,40}|[0-9a-f]{64}")  # drawn, or of `folder_key`


@dataclass(frozen=True, slots=True)
class OwnRun:
    """Import paths in `code`, and links into `folders`."""

    code: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


def folder_key(folder: Path) -> str:
    """Returns the folder key of a run without an id, such as an archive alone."""
    return sha256(os.path.realpath(folder).encode(errors="surrogateescape")).hexdigest()


def own_run(key: str) -> OwnRun:
    """The user's permissions for the run of this id."""
    content = read_private(f"runs/{key}.json") if _ID.fullmatch(key) else None
    if content is None:
        return OwnRun()
    from rollstream.foreign_json import parse_json  # msgspec, which most commands do not need here

    try:
        values = parse_json(content, dict[str, list[str]])
        return OwnRun(tuple(values.get("code", ())), tuple(values.get("folders", ())))
    except ValueError:  # damaged: nothing is allowed
        return OwnRun()


def remember_run(key: str, code: Iterable[str] = (), folders: Iterable[str] = ()) -> bool:
    """Adds to the user's permissions; returns whether they could be written."""
    if not _ID.fullmatch(key):
        return False
    before = own_run(key)
    now = OwnRun(tuple(sorted({*before.code, *code})), tuple(sorted({*before.folders, *folders})))
    is_stored = read_private(f"runs/{key}.json") is not None
    return (is_stored and now == before) or write_private(
        f"runs/{key}.json", json.dumps(asdict(now)).encode()
    )


def remember_urls(urls: Iterable[str]) -> bool:
    """Add URLs of logs and stores, or hosts as HOST:PORT, to those that the user named; returns
    whether all could be written.
    """
    # Each URL is a file of its own, so processes that start together lose none.
    return all(
        is_named(url) or write_private(_url_file(url), url.encode(errors="replace")) for url in urls
    )


def remember_begun(key: str, configuration: Mapping[str, Any], folder: Path) -> None:
    """Remember a run that the user begins or continues on this machine: the code that its
    configuration names, its URLs, and the targets of the links in its folder.
    """
    urls = [str(configuration[name]) for name in ("bus", "store") if name in configuration]
    names = {*code_names(configuration), *token_names(urls)}
    # A private folder that cannot be written is no error: later commands then ask for `--trust`.
    remember_run(key, names, map(str, _linked_folders(folder)))
    remember_urls(url for url in urls if url)


def _linked_folders(folder: Path) -> Iterator[Path]:
    # Links in the run's folder or its store.
    root = Path(os.path.realpath(folder))
    for parent in (root, root / "store"):
        with suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                real = Path(os.path.realpath(entry.path))
                if entry.is_symlink() and real.is_dir() and not real.is_relative_to(root):
                    yield real


def is_named(url: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the user named this URL or host: in a configuration of a run begun on this
    machine, with `rollstream trust`, or in the environment.
    """
    if url in (environment.get(name) for name in URL_VARIABLES):
        return True
    return read_private(_url_file(url)) == _content(url)


def _url_file(url: str) -> str:
    return f"urls/{sha256(_content(url)).hexdigest()[:32]}"


def _content(url: str) -> bytes:
    return url.encode(errors="replace")


def code_names(configuration: Mapping[str, Any]) -> frozenset[str]:
    """Returns the import paths (`module:function`) among the values of a configuration's tables."""
    names: set[str] = set()
    # Not top-level values: the URLs of log and store may look like an import path.
    pending: list[Any] = [v for v in configuration.values() if isinstance(v, dict | list)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += cast("dict[str, Any]", value).values()
        elif isinstance(value, list):
            pending += cast("list[Any]", value)
        elif isinstance(value, str) and IMPORT_PATH.fullmatch(value):
            names.add(value)
    return frozenset(names)


def token_names(urls: Iterable[str]) -> Iterator[str]:
    """Functions that the URL of a Kafka bus names for its OAuth tokens."""
    for url in urls:
        yield from re.findall(r"[?&]token=([^&]+)", url)


def permits_code(names: Collection[str], key: str) -> bool:
    """The user began or trusted the run of this id with all these import paths."""
    return set(names) <= set(own_run(key).code)
