"""Parses `kafka://host:port[,host:port…][/prefix][?option=value&…]` (docs/reference/kafka.md) and
reads the secrets from the environment.
"""

import dataclasses
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, urlsplit

from rollstream.errors import ConfigurationError

Security = Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"]
Mechanism = Literal["plain", "scram-sha-256", "scram-sha-512", "oauthbearer", "msk-iam"]
WhenFull = Literal["block", "raise"]

# Names of environment variables with secrets. The token file is read again for each connection, so
# that its token can be replaced while the process runs; the password file is read once.
USER, PASSWORD, PASSWORD_FILE = "KAFKA_USER", "KAFKA_PASSWORD", "KAFKA_PASSWORD_FILE"
TOKEN_FILE = "KAFKA_TOKEN_FILE"
KEY_PASSWORD = "KAFKA_KEY_PASSWORD"
EXAMPLE = "kafka://host:9092/prefix"
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(\.[A-Za-z0-9_-]+)*")
_PORT = re.compile(r"[0-9]{1,5}")
_FUNCTION = re.compile(r"\w+(\.\w+)*:\w+")  # `module:function`
# The brokers of Amazon MSK, provisioned or serverless: `b-1.NAME.ID.c2.kafka.REGION.amazonaws.com`.
_MSK_HOST = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?:\d+$")
_CHOICES = {"security": Security, "mechanism": Mechanism, "when_full": WhenFull}


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """Each field but `servers` and `prefix` is an option of the URL."""

    servers: tuple[str, ...]
    """The brokers, each as `host:port`."""
    prefix: str = ""
    """Begins the names of the run's topics and groups; each run on a cluster has its own prefix."""
    security: Security = "plaintext"
    """With encryption (`ssl`), authentication (`sasl`), both or none."""
    mechanism: Mechanism = "plain"
    """Used only with `sasl`. `msk-iam` is OAUTHBEARER with a token that AWS credentials sign."""
    ca: str = ""
    """File of the authorities that sign the brokers' certificates; "": the system's."""
    cert: str = ""
    """File of the client's own certificate, for brokers that require one."""
    key: str = ""
    """File of the key of `cert`."""
    token: str = ""
    """A function (`module:function`) that returns an OAuth token; "": the file of KAFKA_TOKEN_FILE.
    """
    region: str = ""
    """AWS region of the brokers, for `msk-iam`; "": the one in the first broker's host name."""
    replication: int = -1
    """Replicas of the topics that this process creates; -1: the broker's default."""
    min_isr: int = 0
    """Replicas that must have a record before it is acknowledged, for topics that this process
    creates; 0: the broker's default.
    """
    linger_ms: int = 0
    """For how long the producer holds a batch back to add more records."""
    batch_bytes: int = 1 << 20
    """Largest batch; no more than 960 KiB are used, the room that topics have for a batch."""
    in_flight_bytes: int = 64 << 20
    """Largest memory that unacknowledged records take in this process."""
    when_full: WhenFull = "block"
    """What an append does while `in_flight_bytes` are in use: `block` waits, `raise` fails at once
    with nothing sent.
    """

    def __str__(self) -> str:
        return f"kafka://{','.join(self.servers)}" + (f"/{self.prefix}" if self.prefix else "")

    def topic(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name


@dataclass(frozen=True, slots=True)
class Secrets:
    """ "" for secrets that the environment lacks; `token_file` is the path of a file with an OAuth
    token.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    token_file: str = ""
    key_password: str = field(default="", repr=False)


def parse_kafka_url(url: str) -> KafkaAddress:
    """Raises `ConfigurationError`, which repeats no user, password or value of an unknown
    option.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket without its pair; the text may hold a secret
        raise ConfigurationError(
            f"bus URL kafka://…: it must name its brokers as host:port, as in {EXAMPLE}"
        ) from None
    where = f"kafka://{parts.netloc}{parts.path}"
    servers = tuple(server for server in parts.netloc.split(",") if server)
    is_right = bool(servers) and all(_is_server(server) for server in servers)
    # A password may hold what ends the part of the brokers: `/`, `?` or `#`.
    if "@" in (url if not is_right else f"{parts.netloc}{parts.path}{parts.fragment}"):
        raise ConfigurationError(
            "bus URL kafka://…@…: it was given with a user or password; take them out of the URL "
            f"and give them in the environment ({USER}, {PASSWORD})"
        )
    if not is_right:
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
    """Returns the secrets in `environment`. Raises `ConfigurationError`, which names the missing
    variables.
    """
    secrets = Secrets(
        environment.get(USER, ""),
        _password(address, environment),
        environment.get(TOKEN_FILE, ""),
        environment.get(KEY_PASSWORD, ""),
    )
    needed: list[str] = []
    if address.security.startswith("sasl") and address.mechanism != "msk-iam":
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


def _password(address: KafkaAddress, environment: Mapping[str, str]) -> str:
    file = environment.get(PASSWORD_FILE, "")
    if PASSWORD in environment or not file:
        return environment.get(PASSWORD, "")
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{address}: the file of {PASSWORD_FILE} cannot be read: {error}"
        ) from None


def msk_region(address: KafkaAddress) -> str:
    """Returns the region for `msk-iam`. Raises `ConfigurationError` if neither the option nor the
    first broker's host name has it.
    """
    match = _MSK_HOST.search(address.servers[0])
    if not address.region and match is None:
        raise ConfigurationError(
            f"{address}: mechanism=msk-iam needs the brokers' region, as in region=eu-north-1"
        )
    return address.region or (match[1] if match else "")


SILENT_S = 10  # without an acknowledgement after which the system ends a connection
CONNECT_TRIES = 2  # to connect again, after 1 and 3 s; the connection has failed after 7 s


def socket_options() -> list[tuple[int, int, int]]:
    """Returns what lets a client notice within seconds that its network was cut, and is back, as
    far as this system has it.
    """
    # By default the system repeats unacknowledged bytes and connects after pauses that double:
    # after a cut of a minute a connection may stay silent for half a minute more, an idle one for
    # ever.
    tcp = {"TCP_NODELAY": 1, "TCP_USER_TIMEOUT": SILENT_S * 1000, "TCP_SYNCNT": CONNECT_TRIES}
    tcp |= {"TCP_KEEPIDLE": SILENT_S // 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
    tcp_options = [(getattr(socket, name, None), value) for name, value in tcp.items()]
    options = [(socket.IPPROTO_TCP, name, value) for name, value in tcp_options if name is not None]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *options]


def client_settings(address: KafkaAddress, secrets: Secrets) -> dict[str, Any]:
    """Returns kafka-python's settings: the brokers, encryption, authentication and timeouts,
    without the provider of OAuth tokens.
    """
    settings: dict[str, Any] = {
        "bootstrap_servers": list(address.servers),
        "socket_options": socket_options(),
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
            "ssl_password": secrets.key_password,  # None would make OpenSSL ask the terminal
        }
    if address.security.startswith("sasl"):
        is_token = address.mechanism in ("oauthbearer", "msk-iam")
        settings["sasl_mechanism"] = "OAUTHBEARER" if is_token else address.mechanism.upper()
        if not is_token:
            settings["sasl_plain_username"] = secrets.user
            settings["sasl_plain_password"] = secrets.password
    return settings


def _is_server(server: str) -> bool:
    host, _, port = server.rpartition(":")
    return bool(host and _PORT.fullmatch(port)) and 0 < int(port) < 1 << 16


def _parse_options(where: str, options: list[tuple[str, str]]) -> dict[str, Any]:
    fields = {
        f.name: f for f in dataclasses.fields(KafkaAddress) if f.name not in ("servers", "prefix")
    }
    values: dict[str, Any] = {}
    for name, text in options:
        if name not in fields:
            # The value of an unknown option may be a secret.
            raise ConfigurationError(
                f"{where}: unknown option {name!r}; known are {', '.join(fields)} (secrets go into "
                f"the environment: {USER}, {PASSWORD}, {PASSWORD_FILE}, {TOKEN_FILE}, "
                f"{KEY_PASSWORD})"
            )
        if isinstance(fields[name].default, int):
            values[name] = _number(where, name, text)
        elif name in _CHOICES and text not in get_args(_CHOICES[name]):
            allowed = ", ".join(get_args(_CHOICES[name]))
            raise ConfigurationError(f"{where}: {name} must be one of {allowed}, got {text!r}")
        else:
            values[name] = text
    return values


def _number(where: str, name: str, text: str) -> int:
    # Options that are not listed are sizes: at least 16 KiB.
    minimum = {"replication": -1, "min_isr": 0, "linger_ms": 0}.get(name, 1 << 14)
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise ConfigurationError(f"{where}: {name} must be a number ≥ {minimum}, got {text!r}")
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
    if address.mechanism == "msk-iam":
        if address.security != "sasl_ssl" or address.token:
            raise ConfigurationError(
                f"{where}: mechanism=msk-iam needs security=sasl_ssl and no token: it signs its own"
            )
        msk_region(address)
    if bool(address.cert) != bool(address.key):
        raise ConfigurationError(f"{where}: give both cert and key, or neither")
    if address.security in ("plaintext", "sasl_plaintext") and (address.ca or address.cert):
        raise ConfigurationError(f"{where}: ca, cert and key need security=ssl or sasl_ssl")
