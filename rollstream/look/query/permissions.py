"""Decides, for a run that may come from another user, to which hosts secrets are sent and which run
it is, by the user's own statements (`own_runs.py`).
"""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError, RollstreamError
from rollstream.look.query.own_runs import is_named
from rollstream.printable import shell_command
from rollstream.storage.stores.kind import store_kind
from rollstream.storage.stores.run_keys import IDENTITY_KEY
from rollstream.streams.kind import NamedBrokers, bus_kind


def folder_of_url(url: str) -> Path | None:
    """Returns the absolute path of a `file:` or `sqlite:` URL."""
    scheme, _, rest = url.partition(":")
    return Path(rest.removeprefix("//")).absolute() if scheme in ("file", "sqlite") else None


def run_id(store: str, named_urls: Collection[str]) -> str:
    """Returns the id of the store's `run.json`; "" if it cannot be read. `named_urls` are those on
    the user's command line.
    """
    from rollstream.foreign_json import parse_json
    from rollstream.storage.stores.read_only import open_store_for_reading

    with suppress(RollstreamError, ValueError):
        folder = folder_of_url(store)
        if folder is None:
            check_hosts(store, store, named_urls)
        # A folder outside of the run is read here before the user is asked for it: one regular file
        # of it, of which only the id is used.
        contained = None if folder is None else ContainedFolder(folder)
        content = open_store_for_reading(store, contained).get(IDENTITY_KEY)
        # Not `RunIdentity`, whose module imports numpy: a query must start fast.
        key = parse_json(content, dict[str, Any]).get("id")
        return key if isinstance(key, str) else ""
    return ""


def check_hosts(run: str, url: str, named_urls: Collection[str]) -> None:
    """Raises `ConfigurationError` if opening this URL of a log or store could send a secret to a
    host that the user did not name, or in plain text to one that only the run's configuration
    names. `named_urls` are those on the user's command line.
    """
    if url in named_urls or is_named(url):
        return
    log = bus_kind(url)
    brokers = None if log is None else log.named_brokers(url)
    if brokers is not None:
        _check_brokers(run, brokers)
    _check_server(run, url)


def _trust(host: str) -> str:
    return shell_command("trust", "RUN", "--host", host)


def _check_brokers(run: str, brokers: NamedBrokers) -> None:
    if not (brokers.is_encrypted and all(map(is_named, brokers.servers))):
        raise ConfigurationError(
            f"{run}: its configuration names the brokers {', '.join(brokers.servers)} "
            f"(security={brokers.security}), and your Kafka credentials are sent only to hosts "
            f"that you named; set ROLLSTREAM_BUS to this URL if the brokers are yours"
            + (f", or: {_trust(brokers.servers[0])}" if brokers.is_encrypted else "")
        )


def _check_server(run: str, url: str) -> None:
    kind = store_kind(url)
    try:
        server = None if kind is None else kind.named_server(url)
    except ConfigurationError as error:
        raise ConfigurationError(f"{run}: {error}") from None
    if server is None or (server.is_encrypted and is_named(server.host)):
        return
    raise ConfigurationError(
        f"{run}: its configuration names {server.what} {server.url}, and your {server.credentials} "
        "credentials are sent only to hosts that you named; set ROLLSTREAM_STORE to the store's "
        f"URL, or {server.variable} to the server's, if it is yours"
        + (f", or: {_trust(server.host)}" if server.is_encrypted else "")
    )
