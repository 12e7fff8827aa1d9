"""Cases in which the run names code (settings, addresses, models) or lays it where Python may look
for it. Each module that is imported, and each of its functions that is called, leaves its name.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, cast

from rollstream.storage.stores.base import content_hash
from rollstream.storage.stores.json_objects import seal
from testbed.hostile_runs.base_run import read_json, write_json
from testbed.hostile_runs.case import Case, Hosts, Mutation
from testbed.hostile_runs.scene import Scene

INSIDE, INSTALLED = "sent_module", "installed_module"
"""A module that lies in the run's folder, and one that the user installed."""
SETTINGS: dict[str, dict[str, object]] = {
    "trainer.advantage": {},
    "trainer.loss": {},
    "trainer.choose": {},
    "task.name": {},
    "scoring.function": {"scoring.count": 1},
    "agent.episode": {},
    "task.sandbox.backend": {},
    "task.options.verifier": {
        "task.name": "dataset", "task.options.path": "store/run.json",
        "task.options.prompt": "id", "task.options.reference": "run",
    },
}  # fmt: skip
"""Settings that name a function, each with those that it needs beside it."""
SHADOWS = (
    "sitecustomize", "usercustomize", "json", "msgspec", "duckdb", "pyarrow", "torch", "storage",
)  # fmt: skip
LOADED = ("configuration_sent", "modeling_sent", "tokenization_sent")


def cases() -> Iterator[Case]:
    """Yields all cases of this file."""
    for key, beside in SETTINGS.items():
        for module in (INSIDE, INSTALLED):
            yield Case(f"{key} names {module}", _named({key: f"{module}:function"} | beside))
    yield Case("mixture of tasks names modules", _mixture)
    yield Case("recorded configuration names modules", _recorded)
    yield Case("archive: trainer.advantage names a module",
               _named({"trainer.advantage": f"{INSIDE}:function"}), "archive")  # fmt: skip
    yield Case("backup: settings name modules", _backup, "backup")
    yield Case("modules in the working directory", _shadows)
    yield Case("package rollstream in the working directory", _package)
    yield Case("model with code of its own", _model_code)
    yield Case("chat template that executes", _template)
    yield Case("pickle in place of weights", _pickle)


def change_settings(scene: Scene, values: Mapping[str, object], name: str = "config.json") -> None:
    """Puts settings, by their dotted keys, into a JSON configuration of the received folder."""
    path = scene.received / name
    configuration = read_json(path)
    for key, value in values.items():
        *tables, leaf = key.split(".")
        table: dict[str, Any] = configuration
        for part in tables:
            table = cast("dict[str, Any]", table.setdefault(part, {}))
        table[leaf] = value
    write_json(path, configuration)


def put_module(scene: Scene, name: str = INSIDE) -> None:
    """Writes a module that marks its import and its calls into the received folder."""
    (scene.received / f"{name}.py").write_text(scene.module(name), encoding="utf-8")


def _named(values: dict[str, object]) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        put_module(scene)
        change_settings(scene, values)

    return mutate


def _mixture(scene: Scene, hosts: Hosts) -> None:
    put_module(scene)
    parts = [{"name": f"{INSIDE}:Task"}, {"name": f"{INSTALLED}:Task"}]
    change_settings(scene, {"task.name": "mixture", "task.parts": parts})


def _recorded(scene: Scene, hosts: Hosts) -> None:
    """The configuration that the trainer recorded in the store, which forks and audits read."""
    put_module(scene)
    for path in (scene.received / "store" / "configurations").iterdir():
        values = read_json(path)
        values |= {"trainer.advantage": f"{INSIDE}:f", "task.name": f"{INSTALLED}:f"}
        write_json(path, values)


def _backup(scene: Scene, hosts: Hosts) -> None:
    """The folder of the restored run is not the working directory; the backup is."""
    put_module(scene)
    values: dict[str, object] = {
        "trainer.advantage": f"{INSIDE}:function", "trainer.loss": f"{INSTALLED}:function",
    }  # fmt: skip
    change_settings(scene, values, "folder/config.json")
    seal_backup(scene)


def seal_backup(scene: Scene, more: dict[str, bytes] | None = None) -> None:
    """Writes `backup.json` again so that its hashes are right; `more` are further keys."""
    path = scene.received / "backup.json"
    body = cast("dict[str, Any]", read_json(path)["body"])
    for entry in body["objects"]:
        data = (scene.received / entry["key"]).read_bytes()
        entry |= {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    for key, data in (more or {}).items():
        entry = {"key": key, "bytes": len(data), "sha256": sha256(data).hexdigest()}
        body["objects"].append(entry)
    path.write_bytes(seal(body))


def _shadows(scene: Scene, hosts: Hosts) -> None:
    for name in SHADOWS:
        put_module(scene, name)


def _package(scene: Scene, hosts: Hosts) -> None:
    for name in ("rollstream", "rollstream/run", "rollstream/run/cli", "testbed"):
        (scene.received / name).mkdir()
        put_module(scene, f"{name}/__init__")


def _model_code(scene: Scene, hosts: Hosts) -> None:
    """Configuration and tokenizer name classes in files beside them (`auto_map`)."""
    roots = [scene.received / "model"]
    roots += [path for path in (scene.received / "store" / "model").iterdir() if path.is_dir()]
    roots += (scene.received / "store" / "weights").glob("v*")
    for root in roots:
        for name in LOADED:
            (root / f"{name}.py").write_text(scene.module(name), encoding="utf-8")
        for name, keys in (
            (
                "config.json",
                {"AutoConfig": f"{LOADED[0]}.C", "AutoModelForCausalLM": f"{LOADED[1]}.M"},
            ),
            ("tokenizer_config.json", {"AutoTokenizer": [f"{LOADED[2]}.T", None]}),
        ):
            if (root / name).exists():
                changed = read_json(root / name) | {"auto_map": keys, "model_type": "sent"}
                write_json(root / name, changed)
    manifest = scene.received / "store" / "model" / "manifest.json"
    values = cast("dict[str, Any]", read_json(manifest))
    for entry in values["files"]:
        data = (manifest.parent / values["digest"] / entry["name"]).read_bytes()
        entry |= {"bytes": len(data), "hash": content_hash(data)}
    write_json(manifest, values)


TEMPLATE = (
    "{{% for c in ().__class__.__base__.__subclasses__() %}}"
    "{{% if c.__name__ == 'catch_warnings' %}}"
    "{{{{ c()._module.__builtins__['open']('{mark}', 'a').write('template\\n') }}}}"
    "{{% endif %}}{{% endfor %}}{{{{ messages }}}}"
)


def _template(scene: Scene, hosts: Hosts) -> None:
    template = TEMPLATE.format(mark=scene.marks)
    for path in scene.received.rglob("tokenizer_config.json"):
        write_json(path, read_json(path) | {"chat_template": template})
        (path.parent / "chat_template.jinja").write_text(template, encoding="utf-8")


def _pickle(scene: Scene, hosts: Hosts) -> None:
    """A pickle that marks that it was loaded, under the names that weights of old formats have."""
    text = f"open({str(scene.marks)!r},'a').write('pickle'+chr(10))"
    data = b"c__builtin__\nexec\n(V" + text.encode() + b"\ntR."
    for folder in (scene.received / "model", *(scene.received / "store" / "weights").glob("v*")):
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
            (folder / name).write_bytes(data)
