"""TLS and SASL against a real broker that requires them; no secret is logged or raised."""

import base64
import json
import logging
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.errors import BusError
from rollstream.streams.bus import AppendEntry
from rollstream.streams.connect import open_bus
from rollstream.streams.kafka.address import parse_kafka_url, read_secrets
from rollstream.streams.kafka.bus import KafkaBus
from rollstream.streams.topics import Topic
from testbed.servers.kafka_broker import KafkaBroker
from testbed.waiting import wait_for

PASSWORD = "hunter2-5d1c"
REAUTHENTICATE_MS = 1500  # a connection with a token lives no longer without a new one
MODULES = "org.apache.kafka.common.security"
LOGINS = {
    "plain": f'plain.PlainLoginModule required user_me="{PASSWORD}"',
    "scram-sha-256": "scram.ScramLoginModule required",
    "scram-sha-512": "scram.ScramLoginModule required",
    "oauthbearer": "oauthbearer.OAuthBearerLoginModule required "
    'unsecuredLoginStringClaim_sub="broker"',
}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaBroker, Path]]:
    """The broker and its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert, keystore = folder / "key.pem", folder / "cert.pem", folder / "keystore.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    keystore.write_text(key.read_text() + cert.read_text())
    settings = {
        "sasl.enabled.mechanisms": ",".join(LOGINS).upper(),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": keystore,
        **{f"{name}.sasl.jaas.config": f"{MODULES}.{login};" for name, login in LOGINS.items()},
        "oauthbearer.connections.max.reauth.ms": REAUTHENTICATE_MS,
    }
    users = [f"SCRAM-SHA-{bits}=[name=me,password={PASSWORD}]" for bits in (256, 512)]
    broker = KafkaBroker(
        more="".join(f"listener.name.secure.{k}={v}\n" for k, v in settings.items()),
        secure=True,
        format_more=[word for user in users for word in ("--add-scram", user)],
    )
    broker.start()
    broker.wait_ready()
    yield broker, cert
    broker.close()


def token() -> str:
    """An unsecured token, which the broker's default validator accepts."""
    now_s = int(time.time())
    parts = [{"alg": "none"}, {"sub": "me", "iat": now_s, "exp": now_s + 600}]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts]
    return b".".join([*encoded, b""]).decode()


def url(secured: tuple[KafkaBroker, Path], mechanism: str) -> str:
    broker, cert = secured
    return (
        f"kafka://127.0.0.1:{broker.secure_port}/{mechanism}?security=sasl_ssl"
        f"&mechanism={mechanism}&ca={cert}"
    )


@pytest.mark.parametrize("mechanism", ["plain", "scram-sha-256", "scram-sha-512"])
def test_a_user_gets_in_by_password_over_tls(
    secured: tuple[KafkaBroker, Path], mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_USER", "me")
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    bus = open_bus(url(secured, mechanism))
    bus.create([Topic("t")])
    assert bus.append("t", [AppendEntry(b"k", b"v")]) == [0]
    assert [m.value for m in bus.read("t", {0: 0})] == [b"v"]
    bus.close()


@pytest.mark.parametrize("source", ["file", "function"])
def test_a_token_gets_in_over_tls(
    secured: tuple[KafkaBroker, Path],
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = url(secured, "oauthbearer")
    if source == "file":
        (tmp_path / "token").write_text(token() + "\n")
        monkeypatch.setenv("KAFKA_TOKEN_FILE", str(tmp_path / "token"))
    else:
        where += "&token=tests.streams.kafka.test_kafka_security:token"
    bus = open_bus(where)
    bus.create([Topic(source)])
    assert bus.append(source, [AppendEntry(b"k", b"v")]) == [0]
    bus.close()


def test_a_wrong_password_is_refused_and_shown_nowhere(
    secured: tuple[KafkaBroker, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "wrong-8a77"
    address = parse_kafka_url(url(secured, "scram-sha-512"))
    secrets = read_secrets(address, {"KAFKA_USER": "me", "KAFKA_PASSWORD": wrong})
    bus = KafkaBus(address, secrets, answer_s=2.0)
    with pytest.raises(BusError) as caught:
        bus.create([Topic("t")])
    assert "127.0.0.1" in str(caught.value)
    assert wrong not in f"{caught.value!r} {caught.value.__cause__!r} {caplog.text} {bus!r}"
    bus.close()


def test_a_broker_with_a_strange_certificate_is_not_spoken_to(
    secured: tuple[KafkaBroker, Path], caplog: pytest.LogCaptureFixture
) -> None:
    address = parse_kafka_url(url(secured, "plain").partition("&ca=")[0])
    secrets = read_secrets(address, {"KAFKA_USER": "me", "KAFKA_PASSWORD": PASSWORD})
    bus = KafkaBus(address, secrets, answer_s=1.0)

    def is_refused_by_name() -> bool:
        with pytest.raises(BusError):
            bus.end("t")
        return "certificate" in caplog.text.lower()

    wait_for(is_refused_by_name)  # its first handshake may take longer than the second given
    bus.close()
