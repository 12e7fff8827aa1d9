"""Cases of odd and damaged contents: databases with views, triggers and virtual tables, JSON nested
without end, numbers beyond floats, Parquet of other types, names with escape sequences, and files
of a size that no run has.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from testbed.hostile_runs.base_run import read_json, write_json
from testbed.hostile_runs.case import Case, Hosts, Mutation
from testbed.hostile_runs.foreign_code import change_settings
from testbed.hostile_runs.linked import parquet
from testbed.hostile_runs.scene import Scene

DEPTH = 100_000
SPARSE_BYTES = 1 << 34
CONTROL = "\x1b]0;owned\x07\x1b[2J\nline\r\u202e"
JSON_FILES = (
    "config.json", "store/run.json", "store/weights/latest.json", "store/model/manifest.json",
    "store/weights/v00000007-t0001/manifest.json",
    "store/checkpoints/s00000006-t0001/manifest.json",
    "store/checkpoints/s00000006-t0001/state.json", "store/dispatch/state.json",
    "store/roles/trainer.json", "store/forked_from.json", "replay.json", "simulation.json",
    "metrics/eval.jsonl", "metrics/trainer.jsonl", "metrics/supervisor.jsonl",
    "metrics/forward-tensorboard.json", "model/tokenizer.json", "model/tokenizer_config.json",
    "model/config.json", "store/audit/verdict",
)  # fmt: skip
TEXTS = {
    "nested": "[" * DEPTH + "]" * DEPTH,
    "nested objects": '{"a":' * DEPTH + "1" + "}" * DEPTH,
    "not finite": '{"step": 1e999, "time_s": NaN, "value": -1e999, "number": 1e308}\n',
    "long numbers": '{"step": ' + "9" * 5_000 + ', "time_s": ' + "9" * 400 + "}\n",
    "other types": '{"step": [], "time_s": {}, "version": "x", "files": 7, "run": null}\n',
    "no object": "[1, null]\n",
    "no text": "\ud800",
    "empty": "",
}
"""Contents of a JSON file, by what is odd about them."""


def cases() -> Iterator[Case]:
    """Yields all cases of this file."""
    for name in TEXTS:
        yield Case(f"JSON {name}: configuration", _text(("config.json",), name))
        yield Case(f"JSON {name}: other files", _text(JSON_FILES[1:], name))
    for key, value in _ODD_SETTINGS.items():
        yield Case(f"setting {key}", _setting(value))
    yield Case("configuration that is no text", _bytes("config.json", b"\xff\xfe\x00"))
    yield Case("configuration of a gigabyte", _sparse("config.json"))
    for name, change in _DATABASES.items():
        yield Case(f"SQLite {name}", _database(change))
    for name in ("bus/ledger.db", "bus/groups.db"):
        yield Case(f"no database {name}", _bytes(name, os.urandom(8192)))
        yield Case(f"truncated {name}", _truncate(name))
    yield Case("database of sixteen gigabytes", _sparse("bus/ledger.db"))
    yield Case("write-ahead log that is none", _bytes("bus/ledger.db-wal", b"x" * 4096))
    yield Case("write-ahead log left by a kill", _killed_writer)
    yield Case(
        "rollback journal", _bytes("bus/ledger.db-journal", b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7")
    )
    for name, table in _TABLES.items():
        yield Case(f"Parquet {name}", _parquet(table))
        yield Case(f"archive: Parquet {name}", _parquet(table), "archive")
    yield Case("archive: truncated Parquet", _damaged_parquet, "archive")
    yield Case("archive: Parquet of sixteen gigabytes", _sparse_parquet, "archive")
    for seconds in (3e10, 1e308, -1.0, 0.0):
        yield Case(f"leases of {seconds:g} s", _leases(seconds))
    yield Case("names with escape sequences", _names)
    yield Case("archive: names with escape sequences", _archive_names, "archive")
    yield Case("backup: nested", _text(("backup.json",), "nested"), "backup")
    yield Case("backup: not finite", _text(("folder/config.json",), "not finite"), "backup")
    yield Case("backup: no text", _bytes("backup.json", b"\xff\xfe"), "backup")


_ODD_SETTINGS: dict[str, dict[str, object]] = {
    "run is no text": {"run": 7},
    "bus is no text": {"bus": ["sqlite:bus"]},
    "bus has an unknown scheme": {"bus": "python:os.system"},
    "store is null": {"store": None},
    "tables are numbers": {"dispatch": 1, "trainer": 2, "model": 3},
    "model path is no text": {"model.path": 5},
    "beyond all bounds": {"trainer.steps": 10**400, "dispatch.max_lag": 10**30},
    "environment in a path": {"model.path": "$HOME/.ssh", "task.tokenizer": "~/.ssh"},
}


def _text(names: tuple[str, ...], kind: str) -> Mutation:
    data = TEXTS[kind].encode("utf-8", "surrogatepass")

    def mutate(scene: Scene, hosts: Hosts) -> None:
        for name in names:
            path = scene.received / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    return mutate


def _bytes(name: str, data: bytes) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        (scene.received / name).write_bytes(data)

    return mutate


def _setting(values: dict[str, object]) -> Mutation:
    return lambda scene, hosts: change_settings(scene, values)


def _sparse(name: str) -> Mutation:
    """The file keeps its beginning, and has no blocks behind it."""

    def mutate(scene: Scene, hosts: Hosts) -> None:
        os.truncate(scene.received / name, 1 << 30 if name == "config.json" else SPARSE_BYTES)

    return mutate


def _truncate(name: str) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        path = scene.received / name
        os.truncate(path, path.stat().st_size // 2 + 100)

    return mutate


def _database(change: str) -> Mutation:
    """Executes `change` on the ledger's and the trajectories' database."""

    def mutate(scene: Scene, hosts: Hosts) -> None:
        for topic in ("ledger", "trajectories"):
            with closing(sqlite3.connect(scene.received / "bus" / f"{topic}.db")) as database:
                database.executescript(change)
                database.commit()
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    return mutate


_COLUMNS = "first, count, timestamp_ms, key, value, sizes"
_DATABASES = {
    "view in place of a table": (
        f"ALTER TABLE log_0 RENAME TO hidden; CREATE VIEW log_0 AS SELECT {_COLUMNS} FROM hidden;"
    ),
    "view without an end": (
        "DROP TABLE log_0; CREATE VIEW log_0 AS WITH RECURSIVE n(first) AS (SELECT 0 UNION ALL "
        "SELECT first + 1 FROM n) SELECT first, 1 AS count, 0 AS timestamp_ms, x'00' AS key, "
        "zeroblob(1000000) AS value, NULL AS sizes FROM n;"
    ),
    "triggers": (
        "CREATE TRIGGER t AFTER INSERT ON log_0 BEGIN DELETE FROM log_0; END;"
        "CREATE TRIGGER u AFTER UPDATE ON begins BEGIN DELETE FROM log_0; END;"
    ),
    "virtual table": (
        "DROP TABLE log_0; CREATE VIRTUAL TABLE log_0 USING fts5("
        "first, count, timestamp_ms, key, value, sizes);"
    ),
    "generated columns": (
        "DROP TABLE log_0; CREATE TABLE log_0 (first INTEGER PRIMARY KEY, count INTEGER AS (1e9), "
        "timestamp_ms INTEGER AS (9e18), key BLOB AS (zeroblob(100000000)), value BLOB, "
        "sizes BLOB);"
        "INSERT INTO log_0 (first) VALUES (0);"
    ),
    "other types": (
        "DROP TABLE log_0; CREATE TABLE log_0 (first, count, timestamp_ms, key, value, sizes);"
        "INSERT INTO log_0 VALUES ('x', 'y', 1e300, 5, 'text', -1), (-5, -1, NULL, NULL, 1.5, 'z');"
    ),
    "settings of a topic that is a path": 'UPDATE settings SET topic = \'{"name": "../../x"}\';',
    "settings that are no JSON": "UPDATE settings SET topic = x'ff';",
    "numbers at the ends": (
        "UPDATE log_0 SET timestamp_ms = 9223372036854775807;"
        "UPDATE begins SET begin = 9223372036854775807 WHERE partition = 1;"
    ),
    "tables are missing": "DROP TABLE log_0; DROP TABLE begins;",
    "sizes that are wrong": "UPDATE log_0 SET sizes = x'ffffffffffffffff', count = 1000000000;",
}


def _killed_writer(scene: Scene, hosts: Hosts) -> None:
    """The last commits are in the write-ahead log only, as after a kill."""
    path = scene.received / "bus" / "ledger.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA wal_autocheckpoint = 0")
        database.execute("UPDATE begins SET begin = begin")
        database.commit()
        copy = path.with_name("kept")
        shutil.copy(f"{path}-wal", copy)
    shutil.move(copy, f"{path}-wal")


def _timestamps() -> Any:
    import pyarrow as pa

    return pa.table(
        {"offset": pa.array([1, 2**62], pa.timestamp("ns", "UTC")), "kind": [None, None]}
    )


def _deep() -> Any:
    import pyarrow as pa

    kind: Any = pa.int64()
    value: Any = 1
    for _ in range(60):
        kind, value = pa.list_(kind), [value]
    return pa.table({"offset": pa.array([value], kind), "original": pa.array([value], kind)})


def _wide() -> Any:
    import pyarrow as pa

    return pa.table({f"column{number}": [number] for number in range(3_000)})


def _strange() -> Any:
    import pyarrow as pa

    values = {
        "offset": pa.array([-1, None]),
        "timestamp_ms": pa.array([2**63 - 1, -(2**63)]),
        "key": pa.array([CONTROL, "x"]),
        "schema": pa.array([b"\xff", None]),
        "original": pa.array(["no bytes", None]),
        "rewards": pa.array([float("nan"), float("inf")]),
    }
    return pa.table(values)


_TABLES: dict[str, Callable[[], Any]] = {
    "timestamps in ns": _timestamps,
    "nested 60 deep": _deep,
    "with 3000 columns": _wide,
    "of other types": _strange,
}


def _parquet(table: Callable[[], Any]) -> Mutation:
    """The first archived file of each topic is another one."""

    def mutate(scene: Scene, hosts: Hosts) -> None:
        import pyarrow.parquet as pq

        for topic in ("ledger", "trajectories", "admissions"):
            pq.write_table(table(), parquet(scene, topic))

    return mutate


def _damaged_parquet(scene: Scene, hosts: Hosts) -> None:
    for topic in ("ledger", "trajectories"):
        path = parquet(scene, topic)
        data = bytearray(path.read_bytes())
        data[len(data) // 2 : len(data) // 2 + 40] = os.urandom(40)
        path.write_bytes(data[:-20] + data[-8:])


def _sparse_parquet(scene: Scene, hosts: Hosts) -> None:
    path = parquet(scene, "trajectories")
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(SPARSE_BYTES)
        file.write(data[-4096:])


def _leases(seconds: float) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        for path in (scene.received / "store" / "roles").glob("*.json"):
            write_json(path, read_json(path) | {"released": False, "duration_s": seconds})

    return mutate


def _names(scene: Scene, hosts: Hosts) -> None:
    change_settings(scene, {"run": CONTROL, "task.system": CONTROL, "code_revision": CONTROL})
    for name in (CONTROL.replace("\x00", ""), "-rf", "--output=x", " ", "a'; DROP TABLE x; --"):
        (scene.received / "logs" / name).write_text(CONTROL, encoding="utf-8")
        (scene.received / "metrics" / f"{name}.jsonl").write_text("{}\n", encoding="utf-8")
        (scene.received / "store" / "weights" / name).mkdir(parents=True)
    manifest = cast("dict[str, Any]", read_json(scene.received / "store" / "run.json"))
    write_json(
        scene.received / "store" / "run.json", manifest | {"run": CONTROL, "release": CONTROL}
    )


def _archive_names(scene: Scene, hosts: Hosts) -> None:
    """The archive's run, topic and day are text for a terminal, and end a quoted SQL text."""
    for path in sorted((scene.received / "store" / "archive").glob("topic=*")):
        inner = next(path.iterdir())
        inner.rename(path / f"run={CONTROL}'; --")
    _copy_topic(scene.received / "store" / "archive")


def _copy_topic(folder: Path) -> None:
    source = folder / "topic=ledger"
    shutil.copytree(source, folder / "topic=led'ger; ATTACH 'x.db' AS x; --")
