"""Parses `s3://bucket/prefix?endpoint=…`. A URL with credentials is refused; errors name a
parameter without its value, which could be a secret.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from re import fullmatch
from urllib.parse import SplitResult, parse_qsl, urlsplit

from rollstream.errors import ConfigurationError
from rollstream.storage.stores.base import is_key

DEADLINE_S = 120.0
DEADLINE_S_MIN, DEADLINE_S_MAX = 0.2, 3600.0
PARAMETERS = (
    "endpoint",
    "path_style",
    "region",
    "sse",
    "sse_kms_key_id",
    "deadline_s",
)
ENCRYPTIONS = ("AES256", "aws:kms")
CHAIN = (
    "credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE), "
    "a profile or the machine's role"
)


@dataclass(frozen=True, slots=True)
class S3Address:
    """`path_style` (the default with an endpoint) puts the bucket into a request's path, not into
    the host name. `sse` is S3's server-side encryption, with `sse_kms_key_id` for a key of AWS KMS,
    `deadline_s` the limit of one operation.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    sse: str | None = None
    sse_kms_key_id: str | None = None
    deadline_s: float = DEADLINE_S

    def __str__(self) -> str:
        folder = f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        return f"{folder} at {self.endpoint}" if self.endpoint else folder


def parse_s3_url(url: str) -> S3Address:
    """Returns the place that an `s3:` URL names. Raises `ConfigurationError`, with the expected
    form.
    """
    try:
        split = urlsplit(url)
        bucket = _bucket(split)
        parameters = dict(parse_qsl(split.query, True, strict_parsing=True)) if split.query else {}
    except ConfigurationError:
        raise
    except ValueError:
        # The library's message quotes the bad field, which might be a secret.
        raise ConfigurationError(
            "store URL s3://…: write it as s3://bucket/prefix?name=value&name=value"
        ) from None
    where = f"store URL s3://{bucket}"
    _check_names(parameters, where)
    prefix = split.path.strip("/")
    if prefix and not is_key(prefix):
        raise ConfigurationError(
            f"{where}: the prefix {prefix[:80]!r} must be parts of [A-Za-z0-9._=-] joined by '/'"
        )
    endpoint = _endpoint(parameters, where)
    sse, key_id = _encryption(parameters, where)
    return S3Address(
        bucket,
        prefix,
        endpoint,
        parameters.get("region") or None,
        _flag(parameters, "path_style", endpoint is not None, where),
        sse,
        key_id,
        _deadline(parameters, where),
    )


def _bucket(split: SplitResult) -> str:
    is_bucket = fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", split.netloc) is not None
    # A secret key may hold what ends the part of the bucket: `/`, `?` or `#`.
    if "@" in (split.netloc if is_bucket else split.geturl()):
        raise ConfigurationError(f"store URL s3://…@…: it must not hold credentials; {CHAIN}")
    if split.fragment:
        raise ConfigurationError("store URL s3://…: it has a '#', which no bucket or key may hold")
    if not is_bucket:
        raise ConfigurationError(
            f"store URL s3://{split.netloc[:80]}: name a bucket of 3 to 63 of [a-z0-9.-], "
            "as in s3://bucket/prefix"
        )
    return split.netloc


def _check_names(parameters: Mapping[str, str], where: str) -> None:
    for name in parameters:
        if name in PARAMETERS:
            continue
        if any(word in name.lower() for word in ("secret", "access", "token", "password")):
            raise ConfigurationError(f"{where}: it must not hold credentials ({name}); {CHAIN}")
        near = get_close_matches(name, PARAMETERS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(PARAMETERS)}"
        raise ConfigurationError(f"{where}: unknown parameter {name[:40]!r}; {hint}")


def _endpoint(parameters: Mapping[str, str], where: str) -> str | None:
    endpoint = parameters.get("endpoint")
    if not endpoint:
        return None
    try:
        split = urlsplit(endpoint)
        _ = split.port  # reading it checks it
    except ValueError:
        raise ConfigurationError(f"{where}: endpoint must be http[s]://host[:port]") from None
    if "@" in split.netloc:
        raise ConfigurationError(f"{where}: endpoint must not hold credentials; {CHAIN}")
    if split.scheme not in ("http", "https") or not split.hostname or split.query:
        raise ConfigurationError(f"{where}: endpoint must be a URL like http://127.0.0.1:7070")
    return endpoint.rstrip("/")


def _encryption(parameters: Mapping[str, str], where: str) -> tuple[str | None, str | None]:
    sse, key_id = parameters.get("sse") or None, parameters.get("sse_kms_key_id") or None
    if sse is not None and sse not in ENCRYPTIONS:
        raise ConfigurationError(f"{where}: sse must be one of {', '.join(ENCRYPTIONS)}")
    if key_id is not None and sse != "aws:kms":
        raise ConfigurationError(f"{where}: sse_kms_key_id needs sse=aws:kms beside it")
    return sse, key_id


def _flag(parameters: Mapping[str, str], name: str, default: bool, where: str) -> bool:
    text = parameters.get(name)
    if text is None:
        return default
    if text not in ("true", "false"):
        raise ConfigurationError(f"{where}: {name} must be true or false")
    return text == "true"


def _deadline(parameters: Mapping[str, str], where: str) -> float:
    text = parameters.get("deadline_s", str(DEADLINE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not isfinite(seconds) or not DEADLINE_S_MIN <= seconds <= DEADLINE_S_MAX:
        limits = f"{DEADLINE_S_MIN:g} to {DEADLINE_S_MAX:g}"
        raise ConfigurationError(f"{where}: deadline_s must be a number from {limits}")
    return seconds
