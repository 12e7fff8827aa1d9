"""Parses the address of a Kafka bus: its URL, and the secrets from the environment.

The URL is `kafka://host:port[,host:port…][/prefix][?option=value&…]`. Secrets are never in it,
because it ends up in `config.json`, in logs and in error messages.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, urlsplit

from rollstream.errors import ConfigurationError

Security = Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"]
Mechanism = Literal["plain", "scram-sha-256", "scram-sha-512", "oauthbearer"]
WhenFull = Literal["block", "raise"]

USER, PASSWORD = "KAFKA_USER", "KAFKA_PASSWORD"
TOKEN_FILE = "KAFKA_TOKEN_FILE"  # read again for each connection, so that it can be rotated
KEY_PASSWORD = "KAFKA_KEY_PASSWORD"
EXAMPLE = "kafka://host:9092/prefix"
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(\.[A-Za-z0-9_-]+)*")
_FUNCTION = re.compile(r"\w+(\.\w+)*:\w+")
_CHOICES = {"security": Security, "mechanism": Mechanism, "when_full": WhenFull}


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """Holds a parsed URL; each field but `servers` and `prefix` is an option of the same name."""

    servers: tuple[str, ...]
    prefix: str = ""
    security: Security = "plaintext"
    mechanism: Mechanism = "plain"
    ca: str = ""
    """File of the authorities that sign the brokers' certificates; "": the system's."""
    cert: str = ""
    key: str = ""
    """Files of the client's own certificate and key, for brokers that require one."""
    token: str = ""
    """`module:function` that returns an OAuth token, instead of the file in KAFKA_TOKEN_FILE."""
    replication: int = -1
    """Replicas of topics created here; -1: the broker's default."""
    min_isr: int = 0
    """Replicas that must have a record before it is acknowledged; 0: the broker's default."""
    linger_ms: int = 0
    """How long a batch waits for more records."""
    batch_bytes: int = 1 << 20
    in_flight_bytes: int = 64 << 20
    """Most memory that unacknowledged records take in this process."""
    when_full: WhenFull = "block"
    """At the bound `in_flight_bytes` an append waits (`block`), or raises with nothing sent
    (`raise`).
    """

    def __str__(self) -> str:
        return f"kafka://{','.join(self.servers)}" + (f"/{self.prefix}" if self.prefix else "")

    def topic(self, name: str) -> str:
        """Return the broker's name of one of our topics or consumer groups."""
        return f"{self.prefix}.{name}" if self.prefix else name


@dataclass(frozen=True, slots=True)
class Secrets:
    """Holds secrets from the environment; they are never printed."""

    user: str = ""
    password: str = field(default="", repr=False)
    token_file: str = ""
    key_password: str = field(default="", repr=False)


def parse_kafka_url(url: str) -> KafkaAddress:
    """Return the address of a URL. `ConfigurationError` names the wrong part but no secret."""
    parts = urlsplit(url)
    where = f"kafka://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in parts.netloc:
        raise ConfigurationError(
            f"{where} was given with a user or password; take them out of the URL and give them in "
            f"the environment ({USER}, {PASSWORD})"
        )
    servers = tuple(server for server in parts.netloc.split(",") if server)
    if not servers or not all(_is_server(server) for server in servers):
        raise ConfigurationError(f"{where} must name its brokers as host:port, as in {EXAMPLE}")
    prefix = parts.path.strip("/")
    if prefix and _PREFIX.fullmatch(prefix) is None:
        raise ConfigurationError(
            f"{where}: {prefix!r} cannot prefix topic names; use A-Z a-z 0-9 . _ -"
        )
    options = parse_qsl(parts.query, keep_blank_values=True)
    address = KafkaAddress(servers, prefix, **_parse_options(where, options))
    _check_together(where, address)
    return address


def read_secrets(address: KafkaAddress, environment: Mapping[str, str]) -> Secrets:
    """Return the secrets that the address needs, from the environment. `ConfigurationError` names
    missing ones.
    """
    secrets = Secrets(
        environment.get(USER, ""),
        environment.get(PASSWORD, ""),
        environment.get(TOKEN_FILE, ""),
        environment.get(KEY_PASSWORD, ""),
    )
    needed: list[str] = []
    if address.security.startswith("sasl"):
        if address.mechanism == "oauthbearer":
            needed = [] if address.token or secrets.token_file else [TOKEN_FILE]
        else:
            needed = [
                n for n, has in ((USER, secrets.user), (PASSWORD, secrets.password)) if not has
            ]
    if needed:
        raise ConfigurationError(
            f"{address}: {address.mechanism} needs {' and '.join(needed)} in the environment"
        )
    return secrets


def client_settings(address: KafkaAddress, secrets: Secrets) -> dict[str, Any]:
    """Return kafka-python's settings to reach and authenticate the brokers, and its timeouts."""
    settings: dict[str, Any] = {
        "bootstrap_servers": list(address.servers),
        "security_protocol": address.security.upper(),
        "request_timeout_ms": 20_000,
        "bootstrap_timeout_ms": 5_000,
        "retry_backoff_ms": 50,
        "reconnect_backoff_max_ms": 1_000,
        "metadata_max_age_ms": 60_000,
    }
    if address.security in ("ssl", "sasl_ssl"):
        settings |= {
            "ssl_check_hostname": True,
            "ssl_cafile": address.ca or None,
            "ssl_certfile": address.cert or None,
            "ssl_keyfile": address.key or None,
            "ssl_password": secrets.key_password or None,
        }
    if address.security.startswith("sasl"):
        settings["sasl_mechanism"] = address.mechanism.upper()
        if address.mechanism != "oauthbearer":
            settings["sasl_plain_username"] = secrets.user
            settings["sasl_plain_password"] = secrets.password
    return settings


def _is_server(server: str) -> bool:
    host, _, port = server.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def _parse_options(where: str, options: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the options by name, in their types. An error about an unknown option repeats only its
    name.
    """
    known = {
        f.name: f for f in dataclasses.fields(KafkaAddress) if f.name not in ("servers", "prefix")
    }
    values: dict[str, Any] = {}
    for name, text in options:
        if name not in known:
            raise ConfigurationError(
                f"{where}: unknown option {name!r}; known are {', '.join(known)} (secrets go into "
                f"the environment: {USER}, {PASSWORD}, {TOKEN_FILE}, {KEY_PASSWORD})"
            )
        if isinstance(known[name].default, int):
            values[name] = _number(where, name, text)
        elif name in _CHOICES and text not in get_args(_CHOICES[name]):
            allowed = ", ".join(get_args(_CHOICES[name]))
            raise ConfigurationError(f"{where}: {name} must be one of {allowed}, got {text!r}")
        else:
            values[name] = text
    return values


def _number(where: str, name: str, text: str) -> int:
    least = {"replication": -1, "min_isr": 0, "linger_ms": 0}.get(name, 1 << 14)
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigurationError(f"{where}: {name} must be a number ≥ {least}, got {text!r}")
    return number


def _check_together(where: str, address: KafkaAddress) -> None:
    if address.batch_bytes > 1 << 20:
        raise ConfigurationError(
            f"{where}: batch_bytes must be ≤ {1 << 20}, the largest batch that topics accept"
        )
    if address.token and _FUNCTION.fullmatch(address.token) is None:
        raise ConfigurationError(
            f"{where}: token must name a function as module:function; a token itself goes into the "
            f"file that {TOKEN_FILE} names"
        )
    if bool(address.cert) != bool(address.key):
        raise ConfigurationError(f"{where}: give both cert and key, or neither")
    if address.security in ("plaintext", "sasl_plaintext") and (address.ca or address.cert):
        raise ConfigurationError(f"{where}: ca, cert and key need security=ssl or sasl_ssl")
