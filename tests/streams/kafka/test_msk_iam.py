"""`mechanism=msk-iam`: AWS's own signer makes the token. A broker that takes OAuth tokens stands in
for Amazon MSK, which cannot be started here; for it the token is replaced by one that it accepts.
"""

import base64
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from rollstream.errors import ConfigurationError
from rollstream.streams.bus import AppendEntry
from rollstream.streams.connect import open_bus
from rollstream.streams.kafka.address import Secrets, client_settings, msk_region, parse_kafka_url
from rollstream.streams.kafka.tokens import signed_token
from rollstream.streams.topics import Topic
from testbed.servers.kafka_broker import KafkaBroker
from testbed.waiting import wait_for
from tests.streams.kafka.test_kafka_security import secured, token, url

__all__ = ["secured"]  # the fixture

KEY, SECRET = "AKIAEXAMPLE", "hunter2-7c1f"
MSK = "kafka://b-1.runs.a1b2c3.c2.kafka.eu-north-1.amazonaws.com:9098/r"
SIGNED = "&mechanism=msk-iam"


def test_the_region_is_the_hosts_unless_it_is_given() -> None:
    iam = f"{MSK}?security=sasl_ssl{SIGNED}"
    assert msk_region(parse_kafka_url(iam)) == "eu-north-1"
    assert msk_region(parse_kafka_url(f"{iam}&region=us-east-1")) == "us-east-1"
    serverless = "kafka://boot-x.c1.kafka-serverless.eu-west-1.amazonaws.com:9098"
    assert msk_region(parse_kafka_url(f"{serverless}?security=sasl_ssl{SIGNED}")) == "eu-west-1"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("security=sasl_plaintext", "needs security=sasl_ssl"),  # the token is a password
        ("security=sasl_ssl&token=a:b", "no token"),
        ("security=sasl_ssl", "needs the brokers' region"),
    ],
)
def test_what_cannot_be_signed_is_refused_by_name(more: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        parse_kafka_url(f"kafka://h:1?{more}{SIGNED}")


def test_it_needs_no_secret_of_kafka() -> None:
    address = parse_kafka_url(f"{MSK}?security=sasl_ssl{SIGNED}")
    settings = client_settings(address, Secrets())
    assert settings["sasl_mechanism"] == "OAUTHBEARER"
    assert "sasl_plain_password" not in settings


def test_the_token_names_the_action_the_region_and_the_key_and_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    signed = signed_token("eu-north-1")
    asked = urlsplit(base64.urlsafe_b64decode(signed + "=" * (-len(signed) % 4)).decode())
    parameters = parse_qs(asked.query)
    assert asked.netloc == "kafka.eu-north-1.amazonaws.com"
    assert parameters["Action"] == ["kafka-cluster:Connect"]
    assert parameters["X-Amz-Credential"][0].startswith(f"{KEY}/")
    assert parameters["X-Amz-Expires"] == ["900"]
    assert SECRET not in asked.geturl()


def test_without_credentials_the_refusal_names_the_mechanism(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigurationError, match="finds no AWS credentials"):
        signed_token("eu-north-1")


def test_a_token_is_signed_for_each_connection_and_again_before_the_broker_ends_it(
    secured: tuple[KafkaBroker, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker takes no connection for longer than its token allows, or `REAUTHENTICATE_MS`."""
    regions: list[str] = []

    def signed(region: str, aws_debug_creds: bool = False) -> tuple[str, int]:
        regions.append(region)
        return token(), 0

    monkeypatch.setattr("aws_msk_iam_sasl_signer.MSKAuthTokenProvider.generate_auth_token", signed)
    where = url(secured, "oauthbearer").replace("mechanism=oauthbearer", "mechanism=msk-iam")
    bus = open_bus(f"{where}&region=eu-north-1")
    bus.create([Topic("signed")])
    count = 0

    def has_signed_again() -> bool:
        nonlocal count
        assert bus.append("signed", [AppendEntry(b"k", b"v")]) == [count]
        count += 1
        return len(regions) >= connections + 3

    connections = len(regions) + 2  # the producer's and a reader's are made after this
    wait_for(has_signed_again, None, lambda: f"{len(regions)} tokens")
    assert set(regions) == {"eu-north-1"}
    assert len(bus.read("signed", {0: 0}, records_max=count)) == count
    bus.close()
