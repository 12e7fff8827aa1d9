"""Cases in which the run names hosts (brokers, stores, endpoints) and places (absolute paths, `..`
in manifests, parents of forks): a looking command sends no secret there, and reads and writes
nothing there.
"""

import shutil
from collections.abc import Iterator
from typing import Any, cast

from rollstream.storage.stores.base import content_hash
from rollstream.storage.stores.json_objects import seal
from testbed.hostile_runs.base_run import read_json, write_json
from testbed.hostile_runs.case import Case, Hosts, Mutation
from testbed.hostile_runs.foreign_code import (
    INSIDE,
    INSTALLED,
    change_settings,
    put_module,
    seal_backup,
)
from testbed.hostile_runs.linked import replace
from testbed.hostile_runs.scene import Scene

KAFKA = {
    "Kafka, password": "security=sasl_plaintext&mechanism=plain",
    "Kafka, SCRAM": "security=sasl_plaintext&mechanism=scram-sha-256",
    "Kafka, token of the user's file": "security=sasl_plaintext&mechanism=oauthbearer",
    "Kafka, token of a sent function": (
        f"security=sasl_plaintext&mechanism=oauthbearer&token={INSIDE}:f"
    ),
    "Kafka, token of an installed function": (
        f"security=sasl_plaintext&mechanism=oauthbearer&token={INSTALLED}:f"
    ),
    "Kafka, without authentication": "security=plaintext",
}  # fmt: skip
KAFKA_TLS = {
    "Kafka over TLS, password": "security=sasl_ssl&mechanism=plain&ca={ca}",
    "Kafka over TLS, token": "security=sasl_ssl&mechanism=oauthbearer&ca={ca}",
    "Kafka over TLS, key of the user's": "security=ssl&ca={ca}&cert={key}&key={key}",
}
KEY = "home/.ssh/id_ed25519"
UP = "../../../../home/.ssh/authorized_keys"
STOLEN = b"ssh-ed25519 AAAA stranger\n"


def cases() -> Iterator[Case]:
    """Yields all cases of this file."""
    for name, options in (KAFKA | KAFKA_TLS).items():
        yield Case(name, _kafka(options))
    yield Case("archive: Kafka, password", _kafka(KAFKA["Kafka, password"]), "archive")
    yield Case("backup: Kafka, password", _backup_kafka, "backup")
    yield Case("S3 store at an endpoint", _s3("http", "plain"))
    yield Case("S3 store at an endpoint with TLS", _s3("https", "tls"))
    yield Case("archive: S3 store at an endpoint", _s3("http", "plain"), "archive")
    yield Case("backup: S3 store at an endpoint", _backup_s3, "backup")
    yield Case("engine and key at a host", _engine)
    for key, scheme in (("bus", "sqlite"), ("store", "file")):
        yield Case(f"{key} is the project", _place(key, f"{scheme}:{{project}}"))
        yield Case(f"{key} is the project, relative", _place(key, f"{scheme}:../../project"))
        yield Case(f"{key} is the user's run", _place(key, f"{scheme}:{{own}}/{key}"))
        yield Case(f"{key} is a new folder", _place(key, f"{scheme}:{{project}}/new"))
    yield Case("run name is a path", _place("run", "../../project/x"))
    yield Case("model is the user's folder", _place("model.path", "{project}"))
    yield Case("tokenizer is a file of the user's", _place("task.tokenizer", "{home}/.ssh"))
    yield Case("folder is the project", _place("folder", "{project}"))
    yield Case("relay in the project", _relay)
    yield Case("model manifest writes keys through a link", _model_manifest(".ssh"))
    yield Case("model manifest writes into the project", _model_manifest("", "config.json"))
    yield Case("model manifest names ..", _model_manifest(None, UP))
    yield Case("model manifest names an absolute path", _model_manifest(None, "/tmp/planted"))
    yield Case("weight manifest names ..", _weights(UP))
    yield Case("weight manifest names an absolute path", _weights("/etc/hostname"))
    yield Case("pointer names ..", _pointer)
    yield Case("checkpoint manifest names ..", _checkpoint)
    yield Case("fork of the user's run", _parent)
    yield Case("replay of the user's run", _replay)
    yield Case("simulation of the user's files", _simulation)
    yield Case("backup: an object named ..", _backup_key(f"folder/{UP}"), "backup")
    yield Case("backup: an object with an absolute name", _backup_key("/tmp/planted"), "backup")
    yield Case("backup: store is the project", _backup_place("store", "file:{project}"), "backup")
    yield Case("backup: log is the project", _backup_place("bus", "sqlite:{project}"), "backup")


def _places(scene: Scene) -> dict[str, str]:
    return {"project": str(scene.project), "own": str(scene.own_run), "home": str(scene.home)}


def _kafka(options: str) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        put_module(scene)
        change_settings(scene, {"bus": _kafka_url(options, scene, hosts)})

    return mutate


def _kafka_url(options: str, scene: Scene, hosts: Hosts) -> str:
    host = hosts.tls if "ssl" in options else hosts.plain
    authority = scene.received / "ca.pem"
    assert hosts.tls.certificate is not None
    shutil.copy(hosts.tls.certificate, authority)
    chosen = options.format(ca=authority, key=scene.root / "user" / KEY)
    return f"kafka://{host.address}/before?{chosen}"


def _backup_kafka(scene: Scene, hosts: Hosts) -> None:
    url = _kafka_url(KAFKA["Kafka, password"], scene, hosts)
    change_settings(scene, {"bus": url}, "folder/config.json")
    seal_backup(scene)


def _s3_url(scheme: str, hosts: Hosts) -> str:
    host = hosts.tls if scheme == "https" else hosts.plain
    return f"s3://bucket/before?endpoint={scheme}://{host.address}&region=us-east-1&deadline_s=2"


def _s3(scheme: str, host: str) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        change_settings(scene, {"store": _s3_url(scheme, hosts)})

    return mutate


def _backup_s3(scene: Scene, hosts: Hosts) -> None:
    change_settings(scene, {"store": _s3_url("http", hosts)}, "folder/config.json")
    seal_backup(scene)


def _engine(scene: Scene, hosts: Hosts) -> None:
    """An engine that is asked by HTTP, with the variable of the user's that holds its key."""
    url = f"http://{hosts.plain.address}/v1"
    settings = {"rollouts.engine": "vllm", "rollouts.vllm.url": url}
    change_settings(scene, settings | {"rollouts.vllm.api_key_env": "AWS_SECRET_ACCESS_KEY"})


def _place(key: str, value: str) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        change_settings(scene, {key: value.format(**_places(scene))})

    return mutate


def _relay(scene: Scene, hosts: Hosts) -> None:
    folder = str(scene.project / "relay")
    url = f"http://{hosts.plain.address}"
    change_settings(scene, {"relay.enabled": True, "relay.folder": folder, "relay.url": url})


def _model_manifest(linked: str | None, name: str = "authorized_keys") -> Mutation:
    """The starting model has a further file, `name`. With `linked` the folder `model` is a link
    into that folder of the user's home, or into the project ("").
    """

    def mutate(scene: Scene, hosts: Hosts) -> None:
        if linked is not None:
            to = scene.home / linked if linked else scene.project
            replace(scene, "model").symlink_to(to)
        else:
            shutil.rmtree(scene.received / "model")
        path = scene.received / "store" / "model" / "manifest.json"
        manifest = cast("dict[str, Any]", read_json(path))
        entry = {"name": name, "bytes": len(STOLEN), "hash": content_hash(STOLEN)}
        manifest["files"] = [e for e in manifest["files"] if e["name"] != name] + [entry]
        write_json(path, manifest)
        if ".." not in name and not name.startswith("/"):
            (path.parent / manifest["digest"] / name).write_bytes(STOLEN)

    return mutate


def _weights(name: str) -> Mutation:
    """Every version names its files with this path in front."""

    def mutate(scene: Scene, hosts: Hosts) -> None:
        for path in (scene.received / "store" / "weights").glob("v*/manifest.json"):
            manifest = cast("dict[str, Any]", read_json(path))
            for table in _tables(manifest):
                if "bytes" in table and "name" in table:
                    table["name"] = name
                if table.get("file"):
                    table["file"] = name
            write_json(path, manifest)

    return mutate


def _tables(value: Any) -> Iterator[dict[str, Any]]:
    """Yields all objects in a JSON value."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        yield table
        value = list(table.values())
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _tables(item)


def _pointer(scene: Scene, hosts: Hosts) -> None:
    path = scene.received / "store" / "weights" / "latest.json"
    write_json(path, read_json(path) | {"manifest": "../../../../project/config.json"})


def _checkpoint(scene: Scene, hosts: Hosts) -> None:
    for path in (scene.received / "store" / "checkpoints").glob("*/manifest.json"):
        body = read_json(path)["body"]
        for table in _tables(body):
            if "bytes" in table and "name" in table:
                table["name"] = "../" + UP
        path.write_bytes(seal(body))


def _parent(scene: Scene, hosts: Hosts) -> None:
    parentage: dict[str, object] = {
        "run": "own", "folder": str(scene.own_run), "checkpoint": "s00000006-t0001", "step": 6,
        "state_hash": "0" * 32, "prompts": {"again": [], "on": 0}, "changes": {},
    }  # fmt: skip
    write_json(scene.received / "store" / "forked_from.json", parentage)


def _replay(scene: Scene, hosts: Hosts) -> None:
    request: dict[str, object] = {
        "run": str(scene.own_run), "from_step": 6, "to_step": 7, "changes": {}, "where": [],
        "checkpoint": "../../../../project", "start": 6, "steps": 1,
    }  # fmt: skip
    write_json(scene.received / "replay.json", request)


def _simulation(scene: Scene, hosts: Hosts) -> None:
    values = {
        "results": [{"folder": str(scene.project), "name": "../../x"}],
        "html": "/tmp/planted",
    }
    write_json(scene.received / "simulation.json", values)


def _backup_key(key: str) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        seal_backup(scene, {key: STOLEN})

    return mutate


def _backup_place(key: str, value: str) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        change_settings(scene, {key: value.format(**_places(scene))}, "folder/config.json")
        seal_backup(scene)

    return mutate
