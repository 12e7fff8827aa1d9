"""Single requests to an S3 server; only this file uses boto3. A failed one raises `S3Failure`,
which states whether it may have taken effect (`in_doubt`).
"""
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import functools
import logging
import re
import ssl
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from boto3.session import Session
from botocore import exceptions as boto
from botocore.config import Config
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError
from botocore.session import get_session
from urllib3.exceptions import HTTPError

from rollstream.errors import ConfigurationError
from rollstream.http_proxies import may_use_proxy
from rollstream.os_failures import explain_os_error
from rollstream.storage.stores.s3.address import S3Address
from rollstream.storage.stores.s3.errors import (
    RETRIED_KINDS,
    FailureKind,
    S3Failure,
    TimeLimits,
    classify_failure,
)

PARTS_MAX = 10_000  # S3's limit for one upload
PART_BYTES = 16 << 20
FIRST_BYTES = 4 << 20  # of the first request of a read, which fetches a smaller object completely
DELETE_KEYS_MAX = 1000  # S3's limit for one request
# Of one request of a parallel read; with hashing, as fast as boto3's default, 8 MiB (measured).
RANGE_BYTES = 16 << 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ByteRange:
    start: int
    end: int


def split_range(start: int, end: int, bytes_max: int) -> list[ByteRange]:
    """Returns `[start, end)` cut into ranges of `bytes_max` in order; the last may be shorter."""
    return [ByteRange(at, min(end, at + bytes_max)) for at in range(start, end, bytes_max)]


def plan_parts(size: int) -> list[ByteRange]:
    """Returns parts of 16 MiB, or larger where that would give more than `PARTS_MAX` parts."""
    part_bytes_min = -(-size // PARTS_MAX)
    return split_range(0, size, max(PART_BYTES, -(-part_bytes_min // MIB) * MIB))


CHUNK_BYTES = 1 << 20  # the most that is read from a response at once
CONNECTIONS_MAX = 32

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_NOT_SENT = (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.NoAuthTokenError,
)


@dataclass(frozen=True, slots=True)
class ObjectHead:
    size: int
    etag: str
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ListingPage:
    """Names and sizes in the server's order; `more` is the token of the next page."""

    entries: list[tuple[str, int]]
    more: str | None


def _addressing(place: S3Address) -> str:
    if place.path_style:
        return "path"
    # botocore's `auto` means the path for any endpoint, and the host name at AWS unless the bucket
    # has dots, which no certificate covers.
    return "auto" if place.endpoint is None else "virtual"


def _session() -> Session:
    core = get_session()
    core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
    _check_authorities(core.get_config_variable("ca_bundle"))
    return Session(botocore_session=core)


def _check_authorities(authorities: str | None) -> None:
    if not authorities:
        return
    is_folder = Path(authorities).is_dir()
    try:
        ssl.create_default_context(
            cafile=None if is_folder else authorities, capath=authorities if is_folder else None
        )
    except (ssl.SSLError, OSError) as error:
        # Otherwise each request would fail as if the network were at fault.
        raise ConfigurationError(
            f"AWS_CA_BUNDLE (or ca_bundle of the profile) names {authorities}, which holds no "
            f"certificates in PEM form: {error}"
        ) from None


@functools.cache
def _loader(path: str | None) -> Any:
    # 1.5 MB of JSON that each session would parse again: creating a client then takes 140 ms
    # instead of 13.
    return create_loader(path)


class S3Client:
    """A name is an object's full key in the bucket. Every method raises `S3Failure` if its request
    fails.
    """

    def __init__(self, place: S3Address, limits: TimeLimits) -> None:
        config = Config(
            connect_timeout=limits.connect_s,
            read_timeout=limits.silence_s,
            # botocore's own retries respect neither the deadline nor a request in doubt, and would
            # multiply with those of `Attempts`.
            retries={"total_max_attempts": 1},
            max_pool_connections=CONNECTIONS_MAX,
            # Other servers reject the trailers that carry boto3's checksums; each body is covered
            # by its request's signature, and each object by its xxh3 hash (docs/reference/s3.md).
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": _addressing(place)},
            tcp_keepalive=True,
            # None leaves it to the environment. A proxy has another loopback.
            proxies=None if may_use_proxy(place.endpoint) else {},
        )
        try:
            # Below this level botocore logs the source of the credentials.
            logging.getLogger("botocore").setLevel(logging.WARNING)
            self._s3: Any = _session().client(
                "s3", region_name=place.region, endpoint_url=place.endpoint, config=config
            )
        except (boto.BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"store {place}: {error}") from None
        self.retries = self.in_doubt = 0
        """Passing failures, and the writes among them that may have taken effect."""
        self._bucket = place.bucket
        self._encryption = _encryption(place)

    def get(
        self, name: str, requested: ByteRange, etag: str | None, take: Callable[[bytes], None]
    ) -> ObjectHead:
        """Passes a range's bytes, cut off at the object's end, to `take`; returns the head of the
        whole object. With `etag`, a replaced object is a failure. `take` may raise; the chunks may
        be used only once this call has returned: the response may break off.
        """
        condition = {"IfMatch": etag} if etag else {}
        with self._request():
            answer = self._s3.get_object(
                Bucket=self._bucket,
                Key=name,
                Range=f"bytes={requested.start}-{requested.end - 1}",
                **condition,
            )
            returned, size = _given_range(answer)
            if returned != ByteRange(requested.start, min(requested.end, size)):
                answer["Body"].close()
                raise S3Failure(
                    FailureKind.TRANSIENT, "BadAnswer", f"{requested} became {returned}", False
                )
            taken = _read(answer["Body"], take)
        if taken != returned.end - returned.start:
            raise S3Failure(
                FailureKind.TRANSIENT, "Truncated", f"{taken} bytes of {returned}", False
            )
        return ObjectHead(size, _field(answer, "ETag"), answer.get("Metadata", {}))

    def get_empty(self, name: str) -> ObjectHead:
        """Raises an `S3Failure` of kind `CONFLICT` if it has bytes."""
        with self._request():
            # No range of an empty object can be requested.
            answer = self._s3.get_object(Bucket=self._bucket, Key=name)
            answer["Body"].close()
        if answer["ContentLength"] != 0:
            raise S3Failure(FailureKind.CONFLICT, "Replaced", "it was empty a moment ago", False)
        return ObjectHead(0, _field(answer, "ETag"), answer.get("Metadata", {}))

    def put(
        self,
        name: str,
        body: bytes | bytearray,
        metadata: Mapping[str, str],
        condition: "WriteCondition",
    ) -> str:
        with self._request(is_write=True):
            answer = self._s3.put_object(
                Bucket=self._bucket,
                Key=name,
                Body=body,
                Metadata=dict(metadata),
                **self._encryption,
                **condition.arguments,
            )
        return _field(answer, "ETag")

    def create_upload(self, name: str, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; returns its id. The object appears with `complete_upload`."""
        with self._request():
            answer = self._s3.create_multipart_upload(
                Bucket=self._bucket, Key=name, Metadata=dict(metadata), **self._encryption
            )
        return _field(answer, "UploadId")

    def upload_part(self, name: str, upload: str, number: int, body: bytes) -> str:
        with self._request():
            answer = self._s3.upload_part(
                Bucket=self._bucket, Key=name, UploadId=upload, PartNumber=number, Body=body
            )
        return _field(answer, "ETag")

    def complete_upload(
        self, name: str, upload: str, etags: Sequence[str], condition: "WriteCondition"
    ) -> str:
        """Join the parts, whose `etags` are in order; returns the object's etag."""
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(etags, start=1)]
        with self._request(is_write=True):
            answer = self._s3.complete_multipart_upload(
                Bucket=self._bucket,
                Key=name,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                **condition.arguments,
            )
        return _field(answer, "ETag")

    def abort_upload(self, name: str, upload: str) -> None:
        with self._request():
            self._s3.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload)

    def list_page(self, prefix: str, more: str | None) -> ListingPage:
        """Returns the first page under `prefix`, or that of the token `more`."""
        token = {"ContinuationToken": more} if more else {}
        with self._request():
            answer = self._s3.list_objects_v2(Bucket=self._bucket, Prefix=prefix, **token)
        entries = [(entry["Key"], entry["Size"]) for entry in answer.get("Contents", [])]
        return ListingPage(
            entries, answer.get("NextContinuationToken") if answer["IsTruncated"] else None
        )

    def delete(self, name: str) -> None:
        with self._request(is_write=True):
            self._s3.delete_object(Bucket=self._bucket, Key=name)

    def delete_objects(self, names: Sequence[str]) -> dict[str, S3Failure]:
        """Deletes at most `DELETE_KEYS_MAX` objects; returns the failures. A missing object counts
        as deleted.
        """
        listed = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        with self._request(is_write=True):
            answer = self._s3.delete_objects(Bucket=self._bucket, Delete=listed)
        failures: dict[str, S3Failure] = {}
        for error in answer.get("Errors", []):
            code = str(error.get("Code", "Unknown"))
            status = 500 if code == "InternalError" else 400
            failure = classify_failure(status, code, str(error.get("Message", "")))
            if failure.kind is not FailureKind.MISSING:
                failures[str(error.get("Key", ""))] = failure
        return failures

    @contextmanager
    def _request(self, is_write: bool = False) -> Generator[None]:
        try:
            with _translate_failures():
                yield
        except S3Failure as failure:
            self.retries += failure.kind in RETRIED_KINDS
            self.in_doubt += is_write and failure.in_doubt
            raise


@dataclass(frozen=True, slots=True)
class WriteCondition:
    """Only if the key is free (`if_absent`), only if the object has the etag `if_etag`, or
    always.
    """

    if_absent: bool = False
    if_etag: str | None = None

    @property
    def arguments(self) -> dict[str, str]:
        if self.if_absent:
            return {"IfNoneMatch": "*"}
        return {} if self.if_etag is None else {"IfMatch": self.if_etag}


def _encryption(place: S3Address) -> dict[str, str]:
    fields = {"ServerSideEncryption": place.sse, "SSEKMSKeyId": place.sse_kms_key_id}
    return {name: value for name, value in fields.items() if value}


def _field(answer: Mapping[str, Any], name: str) -> str:
    if not answer.get(name):
        raise S3Failure(FailureKind.TRANSIENT, "BadAnswer", f"an answer without {name}", True)
    return str(answer[name])


def _given_range(answer: Mapping[str, Any]) -> tuple[ByteRange, int]:
    match = _CONTENT_RANGE.fullmatch(answer.get("ContentRange") or "")
    if match is None:
        raise S3Failure(
            FailureKind.REFUSED, "NotImplemented", "the server ignored a Range header", False
        )
    first, last, size = map(int, match.groups())
    return ByteRange(first, last + 1), size


def _read(body: Any, take: Callable[[bytes], None]) -> int:
    taken = 0
    with body as raw:
        # read1 returns the bytes that have arrived, so a slow server cannot block the operation.
        while chunk := raw.read1(CHUNK_BYTES):
            take(chunk)
            taken += len(chunk)
    return taken


def _reason(error: BaseException) -> str:
    # The texts of botocore and urllib3 lack the system's error: an unknown name, or no more file
    # descriptors.
    below: list[BaseException] = [error]
    for current in below:
        inner: Any = getattr(current, "kwargs", {})
        causes = (inner.get("error"), current.__cause__, current.__context__)
        new = [cause for cause in causes if isinstance(cause, BaseException)]
        below += [cause for cause in new if all(cause is not seen for seen in below)]
        if isinstance(current, OSError) and current.errno is not None:
            return f" ({explain_os_error(current)})"
    return ""


# OpenSSL's names for what does not pass.
_TLS_CODES = {"CERTIFICATE_VERIFY_FAILED": "Certificate", "WRONG_VERSION_NUMBER": "PlainHTTP"}


@contextmanager
def _translate_failures() -> Generator[None]:
    try:
        yield
    except boto.ClientError as error:
        details: Any = error.response.get("Error", {})
        answered: Any = error.response.get("ResponseMetadata", {})
        status, code = int(answered.get("HTTPStatusCode", 0)), str(details.get("Code", "Unknown"))
        if status == HTTPStatus.BAD_REQUEST and code == "400":  # each server of S3 names its cause
            code = "NoS3"
        raise classify_failure(status, code, str(details.get("Message", ""))) from error
    except _NO_CREDENTIALS as error:
        raise S3Failure(FailureKind.REFUSED, "NoCredentials", str(error), False) from error
    except boto.SSLError as error:
        code = next((code for word, code in _TLS_CODES.items() if word in str(error)), "TLS")
        kind = FailureKind.TRANSIENT if code == "TLS" else FailureKind.REFUSED
        raise S3Failure(kind, code, str(error), False) from error
    except _NOT_SENT as error:
        text = f"{error}{_reason(error)}"
        raise S3Failure(FailureKind.TRANSIENT, "Unreachable", text, False) from error
    except (boto.HTTPClientError, ResponseParserError, HTTPError, OSError) as error:
        # The response was lost, not the request: it may have taken effect.
        raise S3Failure(FailureKind.TRANSIENT, type(error).__name__, str(error), True) from error
    except boto.BotoCoreError as error:
        raise S3Failure(FailureKind.REFUSED, type(error).__name__, str(error), False) from error
