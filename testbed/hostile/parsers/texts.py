"""Parsers of short texts: values of command lines, settings, addresses, keys, parameters of pages,
and headers.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

from rollstream.errors import ConfigurationError, RollstreamError
from rollstream.keep.backup_keys import is_backup_key, parse_segment
from rollstream.keep.replay.conditions import TRAINING_FIELDS
from rollstream.look.explorer.filters import limited, row_filter
from rollstream.look.query.fields import known_topics, meets, parse_condition
from rollstream.look.report.serve import parse_address
from rollstream.producers.agents.keys import SessionIdentity, SessionKeys
from rollstream.producers.scoring.service import retry_after_s
from rollstream.run.cli.main import parse
from rollstream.run.cli.role import parse_versions
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import environment_layer, overrides_layer
from rollstream.run.metrics.endpoint import metrics_port
from rollstream.run.sizes.devices import parse_gpus, parse_kinds
from rollstream.storage.archive.file_names import parse_archive_key
from rollstream.storage.archive.segments import LogRecord
from rollstream.storage.claim_check import parse_blob_key
from rollstream.storage.relay.client import body_length
from rollstream.storage.relay.object import (
    parse_integer,
    parse_key,
    parse_push_range,
    parse_range,
    parse_wait,
)
from rollstream.storage.stores.s3.address import parse_s3_url
from rollstream.storage.weights.manifest import parse_version
from rollstream.streams.kafka.address import parse_kafka_url
from rollstream.streams.values import Address
from testbed.hostile.damage import PIECES, changed_text
from testbed.hostile.parsers.parser import FuzzedParser
from testbed.sample_records import SAMPLES

CONDITIONS = (
    "reward>=1", "tokens<100", "finish=stop", "time>=2026-03-01T09:30", "scores.style>0.5",
    "spans.0.version.number=3", "reason~tool", "step>30", "lag!=null", "key=g7.0", "void=true",
    "time<2026-03-01T09:30:00.5+02:00", "turns.0.finish=stop", "accepted=1",
)  # fmt: skip
COMMAND_LINES = (
    "tail runs/a trajectories --last 3 --where reward>=1 --partition 2", "top runs/a --every 0.5",
    "query runs/a --rows 40 SELECT", "inspect runs/a 4.0 --group 3 --json", "audit runs/a --whole",
    "explore runs/a --port 7461 --host 127.0.0.1 --nice 3", "rm runs/a --keep archive,model --yes",
    "replay runs/a --from-step 3 --set trainer.lr=1 --where step=5", "config runs/a trainer.lr",
    "plan model --gpus 8xH100@2.5 --context 4096 --lora 8", "checkpoints list runs/a --json",
    "run a.toml --seed 3 --set trainer.steps=5 --run runs/a", "weights diff runs/a 3 4", "ls runs",
)  # fmt: skip
SETTINGS = (
    "trainer.lr=1e-5", "trainer.betas=[0.9, 0.99]", "run=a", "task.options.path='x'", "bus=null",
    "evaluation.enabled=true", "agent.command=['a', \"b\"]", "trainer.steps=10",
)  # fmt: skip
NESTED = ("[" * 2000, "{a=" * 2000, "[" * 90, "]" * 90, "9" * 5000, "'''", "\\u", "1979-05-27", "_")


def text_parsers() -> Iterator[FuzzedParser]:
    """Yields the parsers of texts; each gets one of a few valid texts with pieces put in."""
    yield from _words()
    yield _text("--where", CONDITIONS, _condition)
    yield _text("--set", SETTINGS, lambda t: overrides_layer([t], Configuration), NESTED)
    names = ("TRAINER__LR", "RUN", "ROLLOUTS__SLOTS", "METRICS_PORT", "BUS")
    yield FuzzedParser(
        "environment",
        lambda drawn: {
            f"ROLLSTREAM_{changed_text(drawn, drawn.choice(names), ('', '_', '__', 'x'))}":
            changed_text(drawn, drawn.choice(("1e-5", "7", "a", "[1]")), (*PIECES, *NESTED))
        },
        lambda given, folder: (
            environment_layer(given, Configuration), metrics_port(Configuration(), given)
        ),
    )  # fmt: skip
    yield FuzzedParser("command line", _line, lambda line, folder: _command(line))
    parameters = ("limit", "reward_min", "lag_max", "group", "name", "ended", "step", "task")
    values = ("", "1", "-1", "nan", "1e999", "9" * 5000, "open", "\u0661", "1_0", "0.5")
    yield FuzzedParser(
        "parameters of the explorer",
        lambda drawn: {
            drawn.choice(parameters): changed_text(drawn, drawn.choice(values))
            for _ in range(drawn.randint(1, 4))
        },
        lambda given, folder: (row_filter(given), limited(given, 100, 10)),
    )


def _words() -> Iterator[FuzzedParser]:
    gpus = ("8xH100", "2x24GB", "H100", "16xL40S@0.8,8xH100@2.5")
    key = "weights/v00000003-t0001/model-00001-of-00002.safetensors"
    kafka = "kafka://a:9092,b:9093/lab.run?security=sasl_ssl&mechanism=plain&linger_ms=5&ca=/x"
    s3 = "s3://bucket/prefix/a?endpoint=http://127.0.0.1:9000&path_style=true&deadline_s=5"
    archived = "archive/topic=ledger/run=r/date=2026-11-21/ledger-00000-00000000000000000000"
    segment = "log/ledger/00000-00000000000000000000-00000000000000000005.msgpack"
    blob = f"blobs/annotations/2026-01-01T00/{'0' * 32}"
    yield _text("--gpus of tune", gpus, parse_gpus)
    yield _text("--gpus of plan", gpus, parse_kinds)
    yield _text("--versions", ("0,10,60", "3"), parse_versions)
    yield _text("--serve", ("127.0.0.1:7462", "7462", "[::1]:80"), parse_address)
    yield _text("Kafka URL", (kafka,), parse_kafka_url)
    yield _text("S3 URL", (s3,), lambda t: str(parse_s3_url(t)))
    yield _text("name of a version", ("v00000003-t0001",), parse_version, errors=())
    yield _text("key of a blob", (blob,), parse_blob_key, errors=())
    yield _text("key of a segment", (segment,), lambda t: (parse_segment(t), is_backup_key(t)),
                errors=())  # fmt: skip
    yield _text("key of an archive file", (f"{archived}.parquet",),
                lambda t: parse_archive_key(t, 5), errors=())  # fmt: skip
    wrong = (ValueError,)
    yield _text("relay: path", (f"/{key}",), parse_key, errors=wrong)
    yield _text("relay: Range", ("bytes=0-5", "bytes=7-"), lambda t: parse_range(t, 40),
                errors=wrong)  # fmt: skip
    yield _text("relay: Content-Range", ("bytes 0-4/5", "bytes 3-9/10"),
                lambda t: parse_push_range(t, "5"), errors=wrong)  # fmt: skip
    yield _text("relay: number", ("5", "17"), parse_integer, errors=wrong)
    yield _text("relay: wait", ("5", "0.5"), lambda t: parse_wait({"wait": t}), errors=wrong)
    yield _text("length of a body", ("5",), lambda t: body_length({"content-length": t}), errors=())
    yield _text("Retry-After", ("5", "0.5", "Wed, 21 Oct 2026"), retry_after_s, errors=())
    keys = SessionKeys(bytes(32))
    issued = keys.issue(SessionIdentity("g7.0", 1, "r0", 2))
    yield _text("key of a session", (issued,), SessionKeys(bytes(32)).identity, errors=())


def _text(
    name: str,
    valid: Sequence[str],
    read: Callable[[str], object],
    pieces: Sequence[str] = (),
    errors: tuple[type[Exception], ...] = (RollstreamError,),
) -> FuzzedParser:
    def damaged(drawn: Random) -> str:
        return changed_text(drawn, drawn.choice(valid), (*PIECES, *pieces))

    def parsed(text: str, folder: Path) -> object:
        return read(text)

    return FuzzedParser(name, damaged, parsed, errors)


def _condition(text: str) -> None:
    """Parses a condition for each topic, and compares a record of every kind with it."""
    at = Address(0, 5)
    refusals: list[RollstreamError] = []
    for topic in ("trajectories", "ledger", "dead", "status"):
        assert topic in known_topics()
        try:
            condition = parse_condition(text, topic, TRAINING_FIELDS)
        except RollstreamError as error:
            refusals.append(error)
            continue
        for sample in SAMPLES:
            meets(LogRecord(topic, at, 1000, "k", sample), [condition], {"step": 5, "lag": None})
    if len(refusals) == 4:
        raise refusals[0]


def _line(drawn: Random) -> list[str]:
    words: list[str] = [*drawn.choice(COMMAND_LINES).split()]
    for _ in range(drawn.randint(1, 2)):
        at = drawn.randint(1, len(words) - 1)
        match drawn.randrange(4):
            case 0:
                words[at] = changed_text(drawn, words[at])
            case 1:
                words.insert(at, drawn.choice(PIECES))
            case 2:
                words.insert(at, drawn.choice(("--", "-", "--x", "--=", "--json=1", "--where=")))
            case _:
                del words[at]
                words.append("--json")
    return words


def _command(words: Sequence[str]) -> Any:
    """Parses a command line; argparse ends the process with 2, after a message."""
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            return parse(words)
    except SystemExit as ending:
        if ending.code:
            raise ConfigurationError(said.getvalue()) from None
        return None
