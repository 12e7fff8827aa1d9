"""Secrets stay out of messages, and files of a connection are tried before any broker is asked."""

import re
import subprocess
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.run.config.config import load_layers, validate_layers
from rollstream.storage.stores.s3.address import parse_s3_url
from rollstream.storage.stores.s3.client import S3Client
from rollstream.storage.stores.s3.errors import time_limits
from rollstream.streams.connect import check_client
from rollstream.streams.kafka.address import Secrets, parse_kafka_url
from rollstream.streams.kafka.client import base_settings

SECRETS = ["hunter2/secret", "hunter2#x", "hunter2?x", "12345/x", "12345?x", "a/b?c#d"]


@pytest.mark.parametrize("secret", SECRETS)
def test_no_part_of_a_password_is_repeated(secret: str) -> None:
    parts = re.split("[/#?]", secret)
    urls = f"kafka://alice:{secret}@host:9092/run", f"s3://AKIAXX:{secret}@bucket/prefix"
    for key, url in zip(("bus", "store"), urls, strict=True):
        with pytest.raises(ConfigurationError) as refused:
            validate_layers(load_layers(None, [f"{key}={url}"], {}))
        said = str(refused.value)
        assert "password" in said or "credentials" in said
        assert not [part for part in parts if len(part) > 1 and part in said]
        assert "alice" not in said
        assert "AKIAXX" not in said


def test_an_at_sign_in_an_option_is_no_password() -> None:
    url = "kafka://host:9092/run?security=ssl&ca=/home/me@site/ca.pem"
    assert parse_kafka_url(url).ca == "/home/me@site/ca.pem"
    with pytest.raises(ConfigurationError, match="prefix 'a@b'"):
        parse_s3_url("s3://bucket/a@b")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, also in DER, and its key, also under a password."""
    folder = tmp_path_factory.mktemp("certificate")
    for line in (
        "req -x509 -newkey rsa:2048 -nodes -subj /CN=x -days 2 -keyout key.pem -out ca.pem",
        "rsa -in key.pem -aes256 -passout pass:right -out encrypted.pem",
        "x509 -in ca.pem -outform der -out ca.der",
    ):
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(
    ("options", "password", "said"),
    [
        ("ca={}/ca.der", "", "ca.der of the log's URL holds no certificate in PEM form"),
        ("ca={0}/ca.pem&cert={0}/ca.pem&key={0}/encrypted.pem", "", "must hold its password"),
        ("ca={0}/ca.pem&cert={0}/ca.pem&key={0}/encrypted.pem", "wrong", "does not open it"),
        ("ca={0}/ca.pem&cert={0}/ca.pem&key={0}/ca.pem", "", "no certificate and its key"),
        ("ca={0}/ca.pem&cert={0}/ca.pem&key={0}/encrypted.pem", "right", ""),
        ("ca={0}/ca.pem&cert={0}/ca.pem&key={0}/key.pem", "", ""),
    ],
)
def test_certificates_are_tried_before_a_broker_is_asked(
    certificate: Path, options: str, password: str, said: str
) -> None:
    address = parse_kafka_url(f"kafka://127.0.0.1:9/x?security=ssl&{options.format(certificate)}")
    secrets = Secrets(key_password=password)
    if not said:
        assert base_settings(address, secrets)["ssl_password"] == password
        return
    with pytest.raises(ConfigurationError, match=said):
        base_settings(address, secrets)


def test_a_token_file_is_tried_before_a_broker_is_asked(tmp_path: Path) -> None:
    address = parse_kafka_url("kafka://h:1/x?security=sasl_plaintext&mechanism=oauthbearer")
    with pytest.raises(ConfigurationError, match="KAFKA_TOKEN_FILE, /nonexistent/token"):
        base_settings(address, Secrets(token_file="/nonexistent/token"))
    (tmp_path / "token").write_text("word\n")
    secrets = Secrets(token_file=str(tmp_path / "token"))
    assert base_settings(address, secrets)["sasl_oauth_token_provider"].token() == "word"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("security=sasl_ssl&mechanism=scram-sha-512", "needs KAFKA_USER and KAFKA_PASSWORD"),
        ("security=ssl&ca=/nowhere/ca.pem", "ca=/nowhere/ca.pem"),
    ],
)
def test_a_check_names_what_this_process_lacks(
    options: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAFKA_USER", raising=False)
    with pytest.raises(ConfigurationError, match=said):
        check_client(f"kafka://127.0.0.1:9/x?{options}")


@pytest.mark.parametrize("name", ["ca.der", "missing.pem"])
def test_authorities_of_a_store_are_tried_before_it_is_asked(
    certificate: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, limits = parse_s3_url("s3://bucket/x?endpoint=https://127.0.0.1:9"), time_limits(8.0)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate / "ca.pem"))
    S3Client(address, limits)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate / name))
    with pytest.raises(ConfigurationError, match=f"AWS_CA_BUNDLE .*{name}"):
        S3Client(address, limits)
