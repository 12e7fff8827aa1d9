"""What went wrong with one request, as a value: whether to try again, and what to tell people.

Pure. `in_doubt` is the point of it: a request that may have reached the server may have taken
effect, whatever its answer was.
"""

from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum, auto

from streams.errors import ObjectMissing, StoreError, StoreTimeout


class Kind(Enum):
    """How an operation goes on after a failed request."""

    MISSING = auto()  # there is no object of this key
    PRECONDITION = auto()  # If-Match or If-None-Match did not hold
    CONFLICT = auto()  # another write of the key was under way: ask again
    RANGE = auto()  # the range begins at or behind the object's end
    NO_UPLOAD = auto()  # the multipart upload was completed, aborted or collected
    IN_THE_WAY = (
        auto()
    )  # an object or folder blocks the key, or a folder just goes: ask a few times
    TRANSIENT = auto()  # away, overloaded, cut off: try again
    REFUSED = auto()  # trying again gives the same answer


class S3Failure(Exception):
    """One request's failure; never leaves `storage/`."""

    def __init__(self, kind: Kind, code: str, text: str, in_doubt: bool) -> None:
        super().__init__(f"{code}: {text}")
        self.kind, self.code, self.text, self.in_doubt = kind, code, text, in_doubt


_WRITES = frozenset({"write", "create", "swap", "delete"})
_CODES = {
    "NoSuchKey": Kind.MISSING,
    "NoSuchUpload": Kind.NO_UPLOAD,
    "PreconditionFailed": Kind.PRECONDITION,
    "InvalidRange": Kind.RANGE,
    "ConditionalRequestConflict": Kind.CONFLICT,
    "OperationAborted": Kind.CONFLICT,
    "ObjectParentIsFile": Kind.IN_THE_WAY,
    "ExistingObjectIsDirectory": Kind.IN_THE_WAY,
    "RequestTimeout": Kind.TRANSIENT,  # a 400: the body did not arrive in time
    "SlowDown": Kind.TRANSIENT,
    "ServiceUnavailable": Kind.TRANSIENT,
    "XAmzContentSHA256Mismatch": Kind.TRANSIENT,  # damaged on its way; it was not stored
    "BadDigest": Kind.TRANSIENT,
    "IncompleteBody": Kind.TRANSIENT,
}
_STATUSES = {412: Kind.PRECONDITION, 416: Kind.RANGE, 429: Kind.TRANSIENT, 408: Kind.TRANSIENT}

_CREDENTIALS = (
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role"
)
_REGION = "the bucket is in another region: give its own with region=… in the store's URL"
_ADVICE = {
    "NoSuchBucket": "create the bucket or correct its name in the store's URL",
    "AccessDenied": "the policy of these credentials lacks a permission that docs/s3.md lists "
    "(without s3:ListBucket even a missing object looks denied)",
    "AllAccessDisabled": "the account or bucket is closed",
    "NoCredentials": f"no credentials were found: {_CREDENTIALS}",
    "InvalidAccessKeyId": _CREDENTIALS,
    "XAdminUserNotFound": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "ExpiredToken": f"the credentials have run out: {_CREDENTIALS}",
    "InvalidToken": _CREDENTIALS,
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "Certificate": "the endpoint's certificate is not trusted: AWS_CA_BUNDLE names another list",
    "ObjectParentIsFile": "an object is in the way: a key cannot be the folder of another one here",
    "ExistingObjectIsDirectory": "a folder is in the way: a key cannot be the folder of another one here",
    "QuotaExceeded": "the store is full: free space and start again",
    "NotImplemented": "this server lacks what the store needs (docs/s3.md lists it)",
}


def failure_of(status: int, code: str, message: str) -> S3Failure:
    """The failure that an HTTP answer stands for; `code` is the one in its body."""
    kind = _CODES.get(code) or _STATUSES.get(status)
    if kind is None and code == "404":
        kind = Kind.TRANSIENT  # every S3 server says what is missing: this answer was cut off
    if kind is None:
        kind = Kind.TRANSIENT if status >= 500 and code != "NotImplemented" else Kind.REFUSED
    in_doubt = kind is Kind.TRANSIENT and status >= 500
    return S3Failure(kind, code, message, in_doubt)


def advice(code: str) -> str:
    """What to do about a refusal."""
    return _ADVICE.get(code, "nothing acknowledged was lost")


@contextmanager
def told(action: str, where: str) -> Generator[None]:
    """Turn an `S3Failure` of the block into the typed error that says what to do."""
    try:
        yield
    except S3Failure as failure:
        cause = f"cannot {action} {where}: {failure.code} ({failure.text.strip().rstrip('.')})"
        if failure.kind is Kind.MISSING:
            raise ObjectMissing(f"no object {where}") from failure
        if failure.kind in (Kind.TRANSIENT, Kind.CONFLICT):
            raise StoreTimeout(
                f"{cause}, until its deadline; check that the endpoint is up and can be reached "
                "from here (a longer outage is waited for with deadline_s=… in the store's URL)"
                + ("; it may have taken effect" if failure.in_doubt and action in _WRITES else "")
            ) from failure
        raise StoreError(f"{cause}; {advice(failure.code)}") from failure
