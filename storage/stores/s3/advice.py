"""Advice by the error code of an S3 server or of our client (`Unreachable`, `Certificate`,
`PlainHTTP`, `NoS3`), else by the HTTP status.
"""

_CREDENTIALS = (
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role"
)
_REGION = "the bucket is in another region: name it with region=… in the store's URL"
_RIGHTS = (
    "the policy of these credentials lacks a permission that docs/reference/s3.md lists "
    "(without s3:ListBucket even a missing object looks denied)"
)
_CLOSED = "the account or bucket is closed or not paid: its owner has to open it"
_EXPIRED = f"the credentials have expired: {_CREDENTIALS}"
_CLOCK = "this machine's clock is wrong: set it (NTP)"
_FULL = "the store is full or over its quota: free space there and start again"
_LACKS = "this server lacks what the store needs (docs/reference/s3.md lists it)"
_NAME = "correct the bucket's name and prefix in the store's URL"
_KEY = "correct sse and sse_kms_key_id in the store's URL, or enable the key and its use"
_ENDPOINT = "the endpoint is no S3 server, or takes another form of URL: correct endpoint=…"
_PLAIN = "the endpoint does not speak TLS: write http:// in endpoint=…"
_NO_S3 = "no S3 server answers at the endpoint; if it speaks TLS, write https:// in endpoint=…"
_THROTTLED = "the store throttles requests: ask its provider for more, or wait"
_SERVER = "the store is out of order: look at its status page or log, and wait"
_REACH = "check that the endpoint is up and can be reached from here"
_NETWORK = (
    "the network damages or cuts requests: check it, proxies on the way, and that endpoint=… has "
    "the server's scheme (http or https)"
)
_DISABLED = (
    "archived or locked: a rule of the bucket (lifecycle, object lock, versioning) does that"
)
_IN_THE_WAY = "is in the way: a key cannot be the folder of another"
_BROKEN = "an upload was not completed: a restarted process writes the object again"

_CODES = {
    _CREDENTIALS: "InvalidAccessKeyId XAdminUserNotFound SignatureDoesNotMatch InvalidSecurity "
    "MissingSecurityHeader AuthorizationHeaderMissing InvalidCredentials Unauthorized "
    "UnrecognizedClientException NotSignedUp CredentialsNotSupported MissingAuthenticationToken",
    f"no credentials were found: {_CREDENTIALS}": "NoCredentials",
    _EXPIRED: "ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken RequestExpired",
    _RIGHTS: "AccessDenied AccessDeniedException UnauthorizedAccess MethodNotAllowed InvalidPayer",
    _CLOSED: "AllAccessDisabled AccountProblem",
    _CLOCK: "RequestTimeTooSkewed",
    "create the bucket or correct its name in the store's URL": "NoSuchBucket",
    _NAME: "InvalidBucketName InvalidURI KeyTooLongError BucketAlreadyExists NoSuchKey 404",
    _REGION: "PermanentRedirect TemporaryRedirect Redirect AuthorizationHeaderMalformed "
    "IllegalLocationConstraintException InvalidLocationConstraint",
    _FULL: "QuotaExceeded StorageFull XMinioStorageFull EntityTooLarge "
    "InsufficientCapacity InsufficientStorage TooManyBuckets",
    _KEY: "KMS.DisabledException KMS.NotFoundException KMS.KMSInvalidStateException "
    "KMS.AccessDeniedException KMS.InvalidKeyUsageException InvalidEncryptionAlgorithmError "
    "ServerSideEncryptionConfigurationNotFoundError",
    _LACKS: "NotImplemented InvalidArgument InvalidRequest UnsupportedOperation "
    "InvalidStorageClass XAmzContentChecksumMismatch EntityTooSmall MissingContentLength",
    _ENDPOINT: "MalformedXML InvalidDigest UserKeyMustBeSpecified ResponseParserError",
    _PLAIN: "PlainHTTP",
    _NO_S3: "NoS3",
    _DISABLED: "InvalidObjectState ObjectLocked InvalidBucketState OperationNotPermitted",
    _THROTTLED: "SlowDown SlowDownRead SlowDownWrite ServiceUnavailable RequestLimitExceeded "
    "Throttling ThrottlingException TooManyRequests BandwidthLimitExceeded 503 429",
    _SERVER: "InternalError InternalFailure 500 BadAnswer",
    _NETWORK: "RequestTimeout BadDigest IncompleteBody XAmzContentSHA256Mismatch Truncated TLS "
    "ReadTimeoutError ConnectionClosedError ResponseStreamingError IncompleteReadError",
    "the endpoint's certificate is not trusted: set AWS_CA_BUNDLE to its authority": "Certificate",
    f"an object {_IN_THE_WAY}": "ObjectParentIsFile",
    f"a folder {_IN_THE_WAY}": "ExistingObjectIsDirectory",
    _BROKEN: "NoSuchUpload InvalidPart InvalidPartOrder NoSuchVersion",
    "another writer was first: a restarted process looks again": "PreconditionFailed "
    "ConditionalRequestConflict OperationAborted Replaced InvalidRange",
    _REACH: "Unreachable ConnectTimeoutError EndpointConnectionError",
}
_ADVICE = {code: text for text, codes in _CODES.items() for code in codes.split()}
_STATUSES = {
    301: _REGION,
    307: _REGION,
    400: _LACKS,
    401: _CREDENTIALS,
    403: _RIGHTS,
    404: _NAME,
    405: _LACKS,
    407: "a proxy wants a login: correct http_proxy or https_proxy, or name the host in no_proxy",
    408: _NETWORK,
    411: _LACKS,
    413: _FULL,
    429: _THROTTLED,
    501: _LACKS,
    502: "a proxy or load balancer before the store has no answer from it: look at its log",
    503: _THROTTLED,
    504: "a proxy or load balancer before the store has no answer from it: look at its log",
    507: _FULL,
}


def advice(code: str, status: int = 0) -> str:
    if code in _ADVICE:
        return _ADVICE[code]
    if status in _STATUSES:
        return _STATUSES[status]
    return _SERVER if status >= 500 else _ENDPOINT if status else _REACH
