"""Promises of the S3 store alone: races of processes, large objects, errors with advice, and no
secret in any text.
"""

import logging
import os
import subprocess
import sys
from typing import Any

import boto3
import pytest

from rollstream.errors import ConfigurationError, ObjectExists, StoreError, StoreTimeout
from rollstream.storage.stores.base import KeyRefused
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.s3.address import parse_s3_url
from rollstream.storage.stores.s3.errors import classify_failure
from testbed.servers import moto_s3, versity
from tests.foreign_server import foreign_server
from tests.storage.storage_samples import in_threads
from tests.storage.stores.racing import check_races_of_processes
from tests.storage.stores.s3_operations import LARGE, content


@pytest.fixture
def url():
    return versity.new_url()


@pytest.mark.slow
def test_races_of_processes_have_one_winner_per_create_and_lose_no_swap(s3_url):
    check_races_of_processes(s3_url, count=4, keys=20, turns=10)


def test_large_objects_come_back_whole_and_in_ranges(s3_url):
    store = open_store(s3_url)
    data = content(7, 3 * LARGE)
    etag = store.create("large", memoryview(data))
    assert store.read("large") == (data, etag)
    assert store.get("large", 5, LARGE) == data[5:LARGE]
    assert store.get("large", 2 * LARGE) == data[2 * LARGE :]
    assert store.get("large", len(data) - 3, 1 << 40) == data[-3:]
    assert store.put("large", data[: 2 * LARGE]) == store.stat("large").etag != etag
    assert [entry.bytes for entry in store.list()] == [2 * LARGE]


def test_large_creates_of_threads_have_exactly_one_winner(url):
    # Not on moto: its completions look and write in two steps (5.2.5 let three of four win).
    store = open_store(url)

    def create(number):
        try:
            store.create("large", content(number, LARGE))
            return number
        except ObjectExists:
            return None

    won = [number for number in in_threads(4, create) if number is not None]
    assert len(won) == 1
    assert store.get("large") == content(won[0], LARGE)


def test_a_listing_continues_beyond_one_page(url):
    store = open_store(url)
    in_threads(8, lambda t: [store.put(f"many/{n:04d}", b"") for n in range(t, 1100, 8)])
    assert [entry.key for entry in store.list("many/")] == [f"many/{n:04d}" for n in range(1100)]


def requests_of(store: Any, monkeypatch):
    """The names of the S3 requests that the store sends from now on."""
    client, sent = store._client, []
    for name in ("delete", "delete_objects"):
        inner = getattr(client, name)
        wrapped = lambda *a, name=name, inner=inner: sent.append(name) or inner(*a)  # noqa: E731
        monkeypatch.setattr(client, name, wrapped)
    return sent


def test_a_thousand_keys_are_deleted_in_a_request(s3_url, monkeypatch):
    store = open_store(s3_url)
    keys = [f"many/{n:04d}" for n in range(1004)]
    in_threads(8, lambda t: [store.put(key, b"") for key in keys[t::8]])
    sent = requests_of(store, monkeypatch)
    store.delete_all(keys[:1003])
    assert sent == ["delete_objects"] * 2
    assert [entry.key for entry in store.list()] == keys[1003:]


def test_a_server_without_batches_gets_one_request_per_key(url, monkeypatch):
    store: Any = open_store(url)
    for key in ("a", "b", "c", "d"):
        store.put(key, b"x")
    refusal = classify_failure(501, "NotImplemented", "A header you provided implies …")

    def refuse(names):
        raise refusal

    monkeypatch.setattr(store._client, "delete_objects", refuse)
    sent = requests_of(store, monkeypatch)
    store.delete_all(["a", "b"])
    store.delete_all(["c"])
    assert sent == ["delete_objects", "delete", "delete", "delete"]
    assert [entry.key for entry in store.list()] == ["d"]


def test_a_key_that_fails_in_a_batch_is_asked_for_again_and_its_error_raised(url, monkeypatch):
    """Transient errors of keys are retried with those keys alone; a refusal names its key."""
    store: Any = open_store(url)
    for key in ("a", "b", "c"):
        store.put(key, b"x")
    inner, sent = store._client.delete_objects, []

    def flaky(names):
        sent.append(len(names))
        done = [name for name in names if len(sent) > 1 or not name.endswith("b")]
        assert not inner(done)
        slow = classify_failure(400, "SlowDown", "")
        return {name: slow for name in names if name not in done}

    monkeypatch.setattr(store._client, "delete_objects", flaky)
    store.delete_all(["a", "b", "c"])
    assert sent == [3, 1]
    assert list(store.list()) == []
    denied = classify_failure(400, "AccessDenied", "no")
    monkeypatch.setattr(store._client, "delete_objects", lambda names: {names[-1]: denied})

    def deny(name):
        raise classify_failure(403, "AccessDenied", "no")

    monkeypatch.setattr(store._client, "delete", deny)
    with pytest.raises(StoreError, match="AccessDenied"):
        store.delete_all(["a", "b"])
    assert store._has_batches


def test_places_of_one_bucket_do_not_see_each_other(url):
    store = open_store(url)
    store.put("key", b"x")
    base, _, query = url.partition("?")
    assert list(open_store(f"{base}-other?{query}").list()) == []
    whole = open_store(f"{base.rpartition('/')[0]}?{query}")
    assert f"{base.rpartition('/')[2]}/key" in [entry.key for entry in whole.list()]


def test_objects_of_other_tools_are_read_and_names_that_are_no_keys_not_listed(url):
    place = parse_s3_url(url)
    client = boto3.Session().client("s3", endpoint_url=place.endpoint, region_name="us-east-1")
    for name in ("plain", "with space", "folder/"):
        client.put_object(Bucket=place.bucket, Key=f"{place.prefix}/{name}", Body=b"")
    store = open_store(url)
    assert store.get("plain") == b""
    assert [entry.key for entry in store.list()] == ["plain"]


@pytest.mark.parametrize("sse", ["AES256", "aws:kms&sse_kms_key_id=key-1"])
def test_encryption_is_asked_for_on_every_write(sse):
    url = moto_s3.new_url(f"sse={sse}")
    place = parse_s3_url(url)
    store = open_store(url)
    store.put("small", b"x")
    store.create("large", content(1, LARGE))
    client = boto3.Session().client("s3", endpoint_url=place.endpoint, region_name="us-east-1")
    for key in ("small", "large"):
        head = client.head_object(Bucket=place.bucket, Key=f"{place.prefix}/{key}")
        assert head["ServerSideEncryption"] == place.sse
        assert head.get("SSEKMSKeyId") == place.sse_kms_key_id


def every_call(store):
    return [
        lambda: store.put("key", b""),
        lambda: store.create("key", b""),
        lambda: store.create("key", content(1, LARGE)),
        lambda: store.swap("key", b"", '"etag"'),
        lambda: store.get("key"),
        lambda: store.read("key"),
        lambda: store.stat("key"),
        lambda: store.delete("key"),
        lambda: store.delete_all(["key", "other"]),
        lambda: list(store.list()),
    ]


def refused(store, expected):
    for call in every_call(store):
        with pytest.raises(StoreError, match=expected) as caught:
            call()
        assert type(caught.value) is StoreError


def test_a_bucket_that_does_not_exist_is_named(s3_url):
    endpoint = parse_s3_url(s3_url).endpoint
    store = open_store(f"s3://no-such-bucket?endpoint={endpoint}")
    refused(store, "s3://no-such-bucket/.* at http://.*create the bucket")


def test_a_wrong_secret_is_a_matter_of_credentials_and_never_shown(url, monkeypatch, caplog):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    with caplog.at_level(logging.INFO):
        refused(open_store(url), "SignatureDoesNotMatch.*check AWS_ACCESS_KEY_ID")
    assert "hush" not in caplog.text


def test_an_unknown_access_key_does_not_make_objects_look_missing(url, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    refused(open_store(url), "check AWS_ACCESS_KEY_ID")


def test_missing_credentials_are_reported(url, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    refused(open_store(url), "no credentials were found")


def test_credentials_of_a_profile_are_used(url, monkeypatch, tmp_path):
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    lines = f"[lab]\naws_access_key_id={key}\naws_secret_access_key={secret}\n"
    (tmp_path / "credentials").write_text(lines)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    store = open_store(url)
    store.put("key", b"x")
    assert store.get("key") == b"x"


def test_a_profile_that_does_not_exist_is_a_configuration_error(url, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    with pytest.raises(ConfigurationError, match="nobodys"):
        open_store(url)


@pytest.mark.parametrize(("in_url", "asked"), [("0.4", 3600.0), ("3600", 0.4)])
def test_an_endpoint_without_a_listener_is_named(in_url: str, asked: float, monkeypatch):
    """Within the shorter of the two deadlines: the other one is longer than any test may take."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    url = f"s3://bucket/run?endpoint=http://127.0.0.1:9&deadline_s={in_url}"
    store = open_store(url, deadline_s=asked)
    for call in every_call(store):
        with pytest.raises(StoreTimeout, match=r"at http://127\.0\.0\.1:9: Unreachable") as caught:
            call()
        assert "may have taken effect" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "answer", "advice"),
    [
        ("https", b"HTTP/1.0 400 Bad Request\r\n\r\n", "does not speak TLS: write http://"),
        (  # as servers of Go and nginx answer on a port for TLS
            "http",
            b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n",
            "if it speaks TLS, write https://",
        ),
    ],
)
def test_a_wrong_scheme_is_named_at_once(scheme: str, answer: bytes, advice: str, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with foreign_server(answer) as port:
        store = open_store(f"s3://bucket/p?endpoint={scheme}://127.0.0.1:{port}&deadline_s=600")
        with pytest.raises(StoreError, match=advice):
            store.get("k")


def test_a_key_that_is_the_folder_of_another_is_refused_where_the_server_has_folders(url):
    store = open_store(url)
    store.put("a", b"x")
    store.put("b/c", b"x")
    for key in ("a/below", "b"):
        with pytest.raises(StoreError, match="in the way: a key cannot be the folder of another"):
            store.create(key, b"y")
    assert [entry.key for entry in store.list()] == ["a", "b/c"]


def test_a_key_that_is_too_long_with_the_prefix_is_refused(url):
    store = open_store(url.replace("?", "/" + "/".join(["p" * 200] * 2) + "?"))
    with pytest.raises(KeyRefused, match="with the prefix"):
        store.put("/".join(["k" * 200] * 4), b"")


def test_without_the_extra_the_error_names_it():
    script = """
import sys
sys.modules["boto3"] = sys.modules["boto3.session"] = None
from rollstream.storage.stores.connect import open_store
try:
    open_store("s3://bucket/run")
except ValueError as error:
    print(type(error).__name__, error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.startswith("ConfigurationError"), run.stderr
    assert "pip install 'rollstream[cloud]'" in run.stdout


def test_opening_a_folder_does_not_import_boto3(tmp_path):
    script = (
        "import sys; from rollstream.storage.stores.connect import open_store; "
        "open_store(sys.argv[1])\n"
    )
    script += "print(bool({'boto3', 'botocore'} & set(sys.modules)))"
    command = [sys.executable, "-c", script, f"file:{tmp_path}"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr
