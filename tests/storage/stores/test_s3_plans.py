"""The pure parts of the S3 store: URLs, ranges, parts, pauses, and the meaning of an answer."""

import pytest
from botocore.exceptions import EndpointConnectionError
from hypothesis import given, strategies as st

from rollstream.errors import ConfigurationError
from rollstream.storage.stores.s3.address import ENCRYPTIONS, PARAMETERS, S3Address, parse_s3_url
from rollstream.storage.stores.s3.client import (
    PART_BYTES,
    PARTS_MAX,
    S3Client,
    plan_parts,
    split_range,
)
from rollstream.storage.stores.s3.errors import (
    PAUSE_S_MAX,
    FailureKind,
    S3Failure,
    classify_failure,
    pause_s,
    time_limits,
)

sizes = st.integers(0, 1 << 44)


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 20), st.integers(1 << 12, 1 << 20))
def test_ranges_cover_everything_once_in_order_within_their_bound(start, length, bytes_max):
    ranges = split_range(start, start + length, bytes_max)
    assert [r.start for r in ranges] == [start, *(r.end for r in ranges)][: len(ranges)]
    assert sum(r.end - r.start for r in ranges) == length
    assert all(0 < r.end - r.start <= bytes_max for r in ranges)


@given(sizes)
def test_parts_keep_the_limits_of_s3(size):
    parts = plan_parts(size)
    assert len(parts) <= PARTS_MAX
    assert sum(part.end - part.start for part in parts) == size
    assert all(part.end - part.start >= PART_BYTES for part in parts[:-1])
    assert all(part.end - part.start <= 5 << 30 for part in parts)


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_grow_to_their_bound_and_jitter_over_half_of_it(failures, draw):
    assert 0 < pause_s(failures, draw) <= PAUSE_S_MAX
    assert pause_s(failures, 0.0) * 2 == pytest.approx(pause_s(failures, 1.0))
    assert pause_s(failures + 1, draw) >= pause_s(failures, draw)


@given(st.floats(0.2, 3600))
def test_an_operation_that_begins_its_last_request_in_time_ends_in_time(deadline_s):
    limits = time_limits(deadline_s)
    assert min(limits.begin_s, limits.connect_s, limits.silence_s) > 0
    assert limits.begin_s + limits.connect_s + limits.silence_s == pytest.approx(deadline_s)


@pytest.mark.parametrize(
    ("status", "code", "kind", "in_doubt"),
    [
        (404, "NoSuchKey", FailureKind.MISSING, False),
        (404, "NoSuchBucket", FailureKind.REFUSED, False),
        (404, "404", FailureKind.TRANSIENT, False),
        (403, "AccessDenied", FailureKind.REFUSED, False),
        (412, "PreconditionFailed", FailureKind.PRECONDITION, False),
        (412, "412", FailureKind.PRECONDITION, False),
        (409, "ConditionalRequestConflict", FailureKind.CONFLICT, False),
        (409, "ObjectParentIsFile", FailureKind.IN_THE_WAY, False),
        (416, "InvalidRange", FailureKind.RANGE, False),
        (500, "InternalError", FailureKind.TRANSIENT, True),
        (503, "SlowDown", FailureKind.TRANSIENT, True),
        (502, "502", FailureKind.TRANSIENT, True),
        (501, "NotImplemented", FailureKind.REFUSED, False),
        (429, "TooManyRequests", FailureKind.TRANSIENT, False),
        (400, "RequestTimeout", FailureKind.TRANSIENT, False),
    ],
)
def test_what_an_answer_means(status, code, kind, in_doubt):
    failure = classify_failure(status, code, "text")
    assert (failure.kind, failure.in_doubt) == (kind, in_doubt)


def test_a_url_has_everything_but_credentials():
    assert parse_s3_url("s3://bucket") == S3Address("bucket")
    assert parse_s3_url(
        "s3://my.bucket-1/runs/a/?endpoint=http://127.0.0.1:7070&region=eu-north-1"
        "&sse=aws:kms&sse_kms_key_id=arn:aws:kms:eu-north-1:1:key/2&deadline_s=30"
    ) == S3Address(
        "my.bucket-1",
        "runs/a",
        "http://127.0.0.1:7070",
        "eu-north-1",
        True,
        "aws:kms",
        "arn:aws:kms:eu-north-1:1:key/2",
        30.0,
    )
    assert not parse_s3_url("s3://bucket?endpoint=https://r2.example&path_style=false").path_style


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("endpoint=http://r2.example&path_style=false", "http://bucket.r2.example/p/x"),
        ("endpoint=http://r2.example", "http://r2.example/bucket/p/x"),
        ("path_style=true", "https://s3.eu-west-1.amazonaws.com/bucket/p/x"),
        ("deadline_s=1", "https://bucket.s3.eu-west-1.amazonaws.com/p/x"),
    ],
)
def test_the_bucket_stands_where_path_style_says(monkeypatch, options, expected):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    place = parse_s3_url(f"s3://bucket/p?region=eu-west-1&{options}")
    client, urls = S3Client(place, time_limits(1.0)), list[str]()

    def send(request, **_):
        urls.append(request.url)
        raise EndpointConnectionError(endpoint_url=request.url)

    client._s3.meta.events.register("before-send.s3", send)
    with pytest.raises(S3Failure):
        client.get_empty("p/x")
    assert urls == [expected]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://", "name a bucket"),
        ("s3://Bucket/x", "name a bucket"),
        ("s3://bucket:80/x", "name a bucket"),
        ("s3://ab", "name a bucket"),
        ("s3://bucket/a b", "prefix"),
        ("s3://bucket/../x", "prefix"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/x#y", "'#'"),
        ("s3://bucket?regio=x", "did you mean region"),
        ("s3://bucket?zzz=x", "known are endpoint"),
        ("s3://bucket?region", "name=value"),
        ("s3://bucket?endpoint=127.0.0.1:7070", "endpoint must be a URL"),
        ("s3://bucket?path_style=1", "true or false"),
        ("s3://bucket?sse=AES", "sse must be one of AES256, aws:kms"),
        ("s3://bucket?sse_kms_key_id=k", "needs sse=aws:kms"),
        ("s3://bucket?deadline_s=nan", "deadline_s must be a number"),
        ("s3://bucket?deadline_s=0", "deadline_s must be a number"),
        ("s3://[bucket", "write it as"),
    ],
)
def test_a_bad_url_is_refused_with_the_reason(url, expected):
    with pytest.raises(ConfigurationError, match=expected):
        parse_s3_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hush@bucket/prefix",
        "s3://bucket?aws_secret_access_key=hush",
        "s3://bucket?token=hush",
        "s3://bucket?endpoint=http://user:hush@127.0.0.1:7070",
        "s3://bucket?password=hush&hush",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(ConfigurationError) as caught:
        parse_s3_url(url)
    assert "hush" not in str(caught.value)


@given(st.text(max_size=60))
def test_any_url_is_a_place_or_a_clear_error(text):
    try:
        expected = str(parse_s3_url(f"s3://{text}"))
    except ConfigurationError as error:
        expected = str(error).removeprefix("store URL ")
    assert expected.startswith("s3://")


def test_every_parameter_is_documented():
    with open("docs/reference/s3.md", encoding="utf-8") as file:
        text = file.read()
    assert all(f"`{name}" in text for name in PARAMETERS)
    assert all(name in text for name in ENCRYPTIONS)
