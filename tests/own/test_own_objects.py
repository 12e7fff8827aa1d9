"""What is a run's own is declared by its writers: no writer without a declaration, and a backup and
a removal of a run of any kind have everything that it wrote.
"""

import ast
from pathlib import Path

import pytest

from rollstream.keep.own import WRITERS, declarations, declared_keys
from rollstream.keep.replay.repetition import OVERLAY_FILE
from rollstream.look.query.locate import REPLAY_FILE
from rollstream.look.query.token_scores import TOKEN_SCORES_FILE
from rollstream.run.config.run_files import declared_files
from rollstream.storage.archive.file_names import archive_key
from rollstream.storage.claim_check import blob_key
from rollstream.storage.weights.checkpoints import CheckpointId
from rollstream.storage.weights.manifest import manifest_key
from rollstream.storage.weights.shards import shard_name
from rollstream.streams.values import Version
from testbed.own.compared import left_after_removal, missing_in_backup
from testbed.own.kinds import KINDS, make_derived, make_run
from testbed.repository import ROOT

WRITES = ("put", "create", "swap")
STORES = ("store", "_store", "_below", "target", "own")
OF_OTHERS = {
    "consumers/archive/compaction.py": "the archive of file_names",
    "consumers/archive/topic.py": "the archive of file_names",
    "keep/replay/topic_copy.py": "topics of a log",
    "run/config/recorded_configuration.py": "run.json, of identity",
    "consumers/trainer/sharded/rank_writing.py": "the versions of manifest",
    "run/metrics/metered.py": "passes on",
    "keep/backup.py": "a backup's objects",
    "keep/fork.py": "dispatch's state",
    "keep/private_objects.py": "copies",
    "keep/restore.py": "copies",
    "storage/leases.py": "roles, of terms",
    "storage/relay/push.py": "passes on",
    "storage/relay/store.py": "passes on",
    "storage/starting_model/put.py": "the model of manifest",
    "storage/stores/connect.py": "probes, of run_keys",
    "storage/stores/json_objects.py": "any key of its callers",
    "storage/stores/part.py": "passes on",
    "storage/weights/adapters.py": "the versions of manifest",
    "storage/weights/differences.py": "the versions of manifest",
    "storage/weights/publish.py": "the versions of manifest",
    "storage/weights/shards.py": "files of versions and checkpoints",
}
"""Modules that write objects whose keys another module declares, or pass on keys."""


def writes_objects(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    if not any(f"{name}(" in text for name in (*WRITES, "create_idempotent")):
        return False  # most modules need no parser
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "create_idempotent":
            return True
        if isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
            receiver = node.func.value
            name = receiver.attr if isinstance(receiver, ast.Attribute) else None
            name = receiver.id if isinstance(receiver, ast.Name) else name
            if name in STORES:
                return True
    return False


def test_every_module_that_writes_objects_declares_their_keys() -> None:
    """A new writer is declared in `WRITERS`, or named above with the module that declares it."""
    folders = [ROOT / name for name in ("storage", "consumers", "producers", "simulator")]
    paths = [path for folder in (*folders, ROOT / "rollstream") for path in folder.rglob("*.py")]
    declared = {name.removeprefix("rollstream.").replace(".", "/") + ".py" for name in WRITERS}
    undeclared: list[str] = []
    for path in paths:
        name = path.relative_to(ROOT).as_posix().removeprefix("rollstream/")
        if name not in {*declared, *OF_OTHERS} and writes_objects(path):
            undeclared.append(name)
    assert sorted(undeclared) == []


WRITTEN = (
    "run.json", "forked_from.json", "agents/secret", "audit/verdict", "dispatch/state.json",
    "dispatch/lengths.json", f"configurations/{'0' * 32}.json", f"probes/{'0' * 32}",
    "pins/eval.json", "roles/trainer.json", "roles/rollouts/rollout-0.json",
    "roles/rollouts/generation", "roles/replay/replay.json", "weights/latest.json",
    manifest_key(Version(3, 1)), f"weights/{Version(3, 1)}/{shard_name('model', 1, 2)}",
    f"weights/{Version(3, 1)}/{shard_name('delta-rank3', 1, 2)}",
    f"weights/{Version(3, 1)}/adapter_model.safetensors", f"weights/{Version(0, 0)}/config.json",
    f"weights/{Version(3, 1)}/model.safetensors.index.json",
    f"{CheckpointId(1, 4).folder}/manifest.json", f"{CheckpointId(1, 4).folder}/state.json",
    f"{CheckpointId(1, 4).folder}/{shard_name('state-rank0', 1, 1)}",
    "model/manifest.json", f"model/{'0' * 16}/tokenizer/vocab.json",
    f"model/{'0' * 16}/task/0.jsonl",
    "streams/draft/weights/latest.json", "streams/draft/pins/eval.json",
    f"streams/draft/{manifest_key(Version(3, 1))}", "roles/streams/draft.json",
    f"streams/draft/weights/{Version(3, 1)}/{shard_name('model', 1, 2)}",
    blob_key("annotations", "2026-01-01T00", "0" * 32), archive_key("ledger", "one", 0, 0, 0),
)  # fmt: skip
FOREIGN = (
    "weights/notes.txt", "weights/mine/model.safetensors", f"weights/{Version(3, 1)}/notes.txt",
    f"weights/{Version(3, 1)}/deep/config.json", "checkpoints/last.pt", "archive/2025.zip",
    f"{CheckpointId(1, 4).folder}/notes.txt", "archive/topic=ledger/mine.parquet",
    "model/config.json", "model/mine/config.json", "blobs/picture.png", "pins/readme", "roles/x.md",
    "roles/people.json", "dispatch/notes", "agents/list.json", "audit/2025.pdf", "notes.json",
    "streams/notes.txt", "streams/a.b/weights/latest.json", "streams/draft/run.json",
    f"streams/draft/weights/{Version(3, 1)}/notes.txt", "streams/draft/model/manifest.json",
    "configurations/nginx.json", "probes/one", "exp/run.json", f"exp/{manifest_key(Version(3, 1))}",
)  # fmt: skip


def test_keys_have_exactly_the_forms_that_are_written() -> None:
    assert [key for key in WRITTEN if declared_keys(key) is None] == []
    assert [key for key in FOREIGN if declared_keys(key) is not None] == []


def test_a_hub_models_file_is_own_if_a_manifest_names_it() -> None:
    key = f"weights/{Version(3, 1)}/LICENSE.txt"
    assert declared_keys(key) is None
    assert declared_keys(key, {"LICENSE.txt"}) is not None


def test_files_of_the_folder_have_exactly_the_forms_that_are_written() -> None:
    own = [
        "config.json", "run.lock", "nonces.json", "metrics/trainer.jsonl", "metrics/moves.jsonl",
        "metrics/endpoints/rollout-0.json", "logs/trainer.log", "logs/trainer.log.1",
        "model/model.safetensors", "model/tokenizer/tokenizer.json", "profiles/torch-0.json",
        REPLAY_FILE, TOKEN_SCORES_FILE, OVERLAY_FILE, "report.html",
    ]  # fmt: skip
    foreign = ["notes.txt", "logs/notes.txt", "metrics/plot.png", "model/notes.md", "data/x.jsonl",
               "model/mine/config.json", "config.toml", "profiles/cpu.prof"]  # fmt: skip
    assert [path for path in own if declared_files(path) is None] == []
    assert [path for path in foreign if declared_files(path) is not None] == []


def test_every_declaration_states_how_it_is_copied() -> None:
    assert len(declarations()) > len(WRITERS) - 1
    secret = declared_keys("agents/secret")
    assert secret is not None
    assert (secret.copied, secret.private) == ("cut", True)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind == "agents" else pytest.mark.long)
        for kind in KINDS
    ],
)
def test_a_backup_and_a_removal_have_all_that_a_run_of_this_kind_wrote(
    tmp_path: Path, kind: str
) -> None:
    runs = {kind: make_run(kind, tmp_path / kind)}
    if kind == "evaluated":
        runs |= make_derived(runs[kind], tmp_path)
    for name, run in runs.items():
        assert missing_in_backup(run) == [], name
        assert left_after_removal(run) == [], name
