"""Advice is right or silent: errors of Kafka, S3 and the operating system lead to what their code
means, a run's concerns to what its machine allows, and no clock refuses a record.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollstream.errors import BusError, StoreError
from rollstream.storage.stores.file import FileStore
from rollstream.storage.stores.s3.advice import advice
from rollstream.streams.bus import AppendEntry
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import Topic
from testbed.first_hour.advice_situations import SITUATIONS, Situation
from testbed.first_hour.case import FirstHourCase

KAFKA, STORE, SYSTEM = "an error of Kafka", "an error of the store", "an error of the system"
RIGHTS = "who may write what"


def _lacks(text: str, *parts: str, wrong: tuple[str, ...] = (), bytes_max: int = 900) -> str:
    """What the text lacks or should not have."""
    lacking = [part for part in parts if part not in text]
    present = [part for part in wrong if part in text]
    is_long = len(text) > bytes_max
    return f"got {text[:400]!r}, lacks {lacking}" if lacking or present or is_long else ""


# ---- Kafka ---------------------------------------------------------------------------------------


def _explained(kind: str, said: str, *parts: str, folder: Path) -> str:
    """The advice for an error class of the client; only authorization speaks of rights."""
    from kafka import errors  # its stub lacks most classes

    from rollstream.streams.kafka.refusals import explain_error

    make: Any = vars(errors)[kind]
    wrong = () if "Authorization" in kind else (RIGHTS,)
    return _lacks(explain_error(make(said), "run.applied"), *parts, wrong=wrong)


def _every_code(folder: Path) -> str:
    from kafka import errors

    from rollstream.streams.kafka.refusals import ADVICE, explain_error

    classes = [one for one in vars(errors).values() if isinstance(one, type)]
    codes: list[Any] = [one for one in classes if issubclass(one, errors.BrokerResponseError)]
    for kind in codes:
        dump = "Request 'CreateTopicsRequest(version=7, " + 9000 * "x" + ")' failed"
        text, is_rights = explain_error(kind(dump)), "Authorization" in kind.__name__
        if len(text) > 900 or "CreateTopicsRequest" in text or (RIGHTS in text) != is_rights:
            return f"{kind.__name__}: {text[:300]}"
    return "" if len(codes) > 100 and len(ADVICE) > 90 else "the table is not complete"


def _far_clock(seconds: float, folder: Path) -> str:
    """A rollout whose clock is off appends records, one and several at once."""
    from testbed.servers.kafka_broker import new_url

    bus = open_bus(new_url(), lambda: time.time() + seconds)
    try:
        bus.create([Topic("applied")])
        for count in (1, 3):
            bus.append("applied", [AppendEntry(b"k", b"v")] * count)
    except BusError as error:
        return str(error)
    finally:
        bus.close()
    return ""


def _topic_with_limits(folder: Path) -> str:
    """A topic of an earlier release refuses a clock that is ahead."""
    from kafka import KafkaAdminClient
    from kafka.admin import ConfigResource

    from testbed.servers.kafka_broker import new_url, server

    url = new_url()
    bus = open_bus(url, lambda: time.time() + 7200)
    name = f"{url.rpartition('/')[2]}.applied"
    try:
        bus.create([Topic("applied")])
        with KafkaAdminClient(bootstrap_servers=server()) as admin:
            limits = {"message.timestamp.after.max.ms": "3600000"}
            admin.alter_configs([ConfigResource("topic", name, limits)])
        while True:  # until the broker applies it
            bus.append("applied", [AppendEntry(b"k", b"v")])
    except BusError as error:
        needed = ("message.timestamp.after.max.ms=", f"--entity-name {name}", "clock")
        return _lacks(str(error), *needed, wrong=(RIGHTS,))
    finally:
        bus.close()


def _refused_url(change: Callable[[str], str], *parts: str, folder: Path) -> str:
    """Creates topics at the URL of a real broker, then at a changed one."""
    from testbed.servers.kafka_broker import new_url

    url = f"{new_url()}.a"
    error_text = ""
    for one in (url, change(url)):
        bus = open_bus(one)
        try:
            bus.create([Topic("applied")])
        except BusError as error:
            error_text = str(error)
        finally:
            bus.close()
    return _lacks(error_text, *parts, wrong=(RIGHTS, "Request"))


def _collided(url: str) -> str:
    return f"{url[:-2]}_a"


def _unreachable(folder: Path) -> str:
    """A broker advertises a name that nobody knows here."""
    from testbed.servers.kafka_broker import KafkaBroker

    broker = KafkaBroker(advertised="kafka-0.internal.invalid:9092")
    try:
        broker.start()
        broker.wait_ready()
        bus, begin_s = open_bus(f"kafka://{broker.server}/x"), time.monotonic()
        try:
            bus.create([Topic("applied")])
        except BusError as error:
            late = "too late" if time.monotonic() - begin_s > 40 else ""
            needed = ("kafka-0.internal.invalid:9092", "advertised.listeners")
            return late or _lacks(str(error), *needed)
        finally:
            with suppress(BusError):
                bus.close()
    finally:
        broker.close()
    return "the broker was reached"


# ---- S3 ------------------------------------------------------------------------------------------


def _s3(code: str, status: int, *parts: str, folder: Path) -> str:
    return _lacks(advice(code, status), *parts, wrong=("nothing acknowledged",))


# ---- the operating system ------------------------------------------------------------------------

_FILES_USED_UP = """
import os, resource, sys
from pathlib import Path
from rollstream.storage.stores.file import FileStore
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import Topic
store, bus = FileStore(sys.argv[1] + "/store"), open_bus("sqlite:" + sys.argv[1] + "/bus")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for step in (lambda: store.put("key", b"x"), lambda: bus.create([Topic("applied")])):
    try:
        step()
    except OSError as error:
        print(type(error).__name__, error)
"""
_FULL = """
import resource, signal, sys
from pathlib import Path
from rollstream.storage.metrics_file import MetricsFile
from rollstream.run.supervisor.process import ProcessSpec
from rollstream.run.supervisor.supervisor import RunLock, Supervisor, SupervisorLimits
import threading
folder = Path(sys.argv[1])
events = MetricsFile(folder / "supervisor.jsonl")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
lock = RunLock(folder)
code = "import sys; print('x' * 100); sys.stderr.write('y')"
spec = ProcessSpec("trainer", [sys.executable, "-c", "pass"], ends="run")
done = Supervisor([spec], folder / "logs", lock, events.append, limits=SupervisorLimits(tick_s=.01))
nothing = threading.Event()
outcome = done.run(nothing, nothing, lambda states: None)
print(outcome.kind, outcome.message)
"""
_NO_PROCESS = """
import os, resource, sys, threading
from pathlib import Path
from rollstream.run.supervisor.process import ProcessSpec, RestartPolicy
from rollstream.run.supervisor.supervisor import Supervisor, SupervisorLimits
policy = RestartPolicy(deaths_max=2, first_s=.01)
spec = ProcessSpec("trainer", [sys.executable, "-c", "pass"], ends="run")
limits = SupervisorLimits(tick_s=.01)
made = Supervisor([spec], Path(sys.argv[1]), None, policy=policy, limits=limits)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 64))
nothing = threading.Event()
outcome = made.run(nothing, nothing, lambda states: None)
print(outcome.kind, outcome.message)
"""


def _script(text: str, *parts: str, wrong: tuple[str, ...] = (), folder: Path) -> str:
    line = [sys.executable, "-c", text, str(folder)]
    run = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    return _lacks(run.stdout + run.stderr, *parts, wrong=("Traceback", *wrong), bytes_max=4000)


def _store_at(name: str, *parts: str, folder: Path) -> str:
    try:
        FileStore(Path(folder, name) if not name.startswith("/") else name).put("key", b"x")
    except StoreError as error:
        return _lacks(str(error), *parts)
    return "the store was opened"


def _full_file(folder: Path) -> str:
    """A limit on the size of files, on which a process of its own stumbles."""
    return _script(
        "import resource, signal, sys\n"
        "from rollstream.storage.stores.file import FileStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try:\n    FileStore(sys.argv[1]).put('key', b'x' * 99)\n"
        "except OSError as error:\n    print(error)\n",
        "ulimit -f",
        folder=folder,
    )


def _command(words: list[str], *parts: str, folder: Path) -> str:
    """A command line that ends with a message and no traceback."""
    line = [sys.executable, "-m", "rollstream", *(word.format(folder=folder) for word in words)]
    soft = (0, resource.RLIM_INFINITY)
    run = subprocess.run(
        line,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, soft),
        env={
            **os.environ,
            "ROLLSTREAM_STATE": str(folder / "state"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )
    return _lacks(run.stderr, *parts, wrong=("Traceback",), bytes_max=2000)


def _case(
    name: str, kind: str, fault: Callable[..., str], *words: Any, is_slow: bool = False, **more: Any
) -> FirstHourCase:
    def tried(folder: Path) -> str:
        return fault(*words, **more, folder=folder)

    return FirstHourCase(f"{kind}: {name}", kind, tried, is_slow)


def _situation(one: Situation) -> FirstHourCase:
    return FirstHourCase(f"advice: {one.name}", "advice of a concern", lambda _: one.fault())


_TIME = "Timestamp 1795907542476 of message with offset 0 is out of range"
ADVICE_CASES = (
    _case(
        "a time out of range",
        KAFKA,
        _explained,
        "InvalidTimestampError",
        _TIME,
        "clock",
        "run.applied",
    ),
    _case("several times out of range", KAFKA, _explained, "InvalidRecordError", _TIME, "clock"),
    _case("no right to a topic", KAFKA, _explained, "TopicAuthorizationFailedError", "t", RIGHTS),
    _case("no right to a group", KAFKA, _explained, "GroupAuthorizationFailedError", "g", RIGHTS),
    _case("a wrong password", KAFKA, _explained, "SaslAuthenticationFailedError", "no", "password"),
    _case(
        "too few replicas in sync",
        KAFKA,
        _explained,
        "NotEnoughReplicasError",
        "",
        "min.insync.replicas",
    ),
    _case(
        "a batch too large", KAFKA, _explained, "MessageSizeTooLargeError", "", "max.message.bytes"
    ),
    _case("a broker's full disk", KAFKA, _explained, "KafkaStorageError", "", "disk"),
    _case(
        "a policy of the cluster", KAFKA, _explained, "PolicyViolationError", "no", "administrator"
    ),
    _case("a quota", KAFKA, _explained, "ThrottlingQuotaExceededError", "", "quota"),
    _case(
        "an untrusted certificate",
        KAFKA,
        _explained,
        "KafkaConnectionError",
        "CERTIFICATE_VERIFY_FAILED",
        "ca=",
    ),
    _case("every code", KAFKA, _every_code),
    _case("a clock two hours ahead", KAFKA, _far_clock, 7200.0, is_slow=True),
    _case("a clock a day ahead", KAFKA, _far_clock, 86400.0, is_slow=True),
    _case("a clock a year behind", KAFKA, _far_clock, -3.2e7, is_slow=True),
    _case("a topic with limits", KAFKA, _topic_with_limits, is_slow=True),
    _case(
        "a prefix that collides", KAFKA, _refused_url, _collided, "collides", "prefix", is_slow=True
    ),
    _case(
        "more replicas than brokers",
        KAFKA,
        _refused_url,
        lambda url: f"{url}b?replication=3",  # pyright: ignore[reportUnknownLambdaType]
        "replication=",
        is_slow=True,
    ),
    _case("an unknown advertised host", KAFKA, _unreachable, is_slow=True),
    _case("an expired token", STORE, _s3, "ExpiredToken", 400, "expired"),
    _case("a throttled request", STORE, _s3, "SlowDown", 503, "throttles"),
    _case("a wrong clock", STORE, _s3, "RequestTimeTooSkewed", 403, "clock"),
    _case("an unknown code of 403", STORE, _s3, "Odd", 403, "permission"),
    _case("an unknown code of 500", STORE, _s3, "Odd", 500, "out of order"),
    _case("an unknown code of 502", STORE, _s3, "502", 502, "load balancer"),
    _case("a proxy that wants a login", STORE, _s3, "407", 407, "no_proxy"),
    _case("a full store", STORE, _s3, "XMinioStorageFull", 507, "full"),
    _case("a disabled key", STORE, _s3, "KMS.DisabledException", 400, "sse_kms_key_id"),
    _case("a wrong region", STORE, _s3, "PermanentRedirect", 301, "region="),
    _case(
        "no more files",
        SYSTEM,
        _script,
        _FILES_USED_UP,
        "StoreError cannot write",
        "BusError cannot open",
        "may open 64 files",
        wrong=("may write to", "may be written"),
    ),
    _case(
        "a full disk under a supervisor",
        SYSTEM,
        _script,
        _FULL,
        "complete",
        "nonces.json is not written",
    ),
    _case(
        "no more processes",
        SYSTEM,
        _script,
        _NO_PROCESS,
        "failed trainer cannot be started",
        "ulimit -n",
    ),
    _case("a name too long", SYSTEM, _store_at, 300 * "n", "255 bytes"),
    _case("a folder that is a file", SYSTEM, _store_at, "/dev/null/store", "in the way"),
    _case("a file system of the kernel", SYSTEM, _store_at, "/proc/store", "No such file"),
    _case("a file that may not grow", SYSTEM, _full_file),
    _case(
        "a run on a full disk",
        SYSTEM,
        _command,
        ["run", "examples/quickstart.toml", "--run", "{folder}/run"],
        "File too large",
        "ulimit -f",
        is_slow=True,
    ),
    *map(_situation, SITUATIONS),
)
