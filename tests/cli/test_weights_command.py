"""`rollstream weights`: list, verify, compare and export versions."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollstream.run.cli.main import main
from rollstream.storage.starting_model.models import build_model, model_files
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.manifest import read_manifest, version_folder
from rollstream.storage.weights.named_streams import WeightStream
from rollstream.storage.weights.pointer import advance_pointer, take_pointer
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.values import Version
from testbed.memory import MemoryBus
from testbed.versions import publish_small, published_tensors

SIZES = {
    "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
VERSIONS = 3


def stepped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    after = {name: tensor.clone() for name, tensor in tensors.items() if name != "lm_head.weight"}
    after["model.norm.weight"][:3] += 1.0
    return after | {"lm_head.weight": after["model.embed_tokens.weight"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with a store of an anchor and two deltas on it."""
    store = FileStore(tmp_path / "run" / "store")
    model = build_model("Qwen3ForCausalLM", SIZES, seed=3)
    files = model_files(model, None, torch.bfloat16)
    take_pointer(store, "run", 1)
    tensors = published_tensors(model, torch.bfloat16)
    parent, before = None, None
    for number in range(VERSIONS):
        version = Version(number, 1)
        new = NewVersion("run", version, tensors, files, 4000, 0.0)
        parent = publish_version(store, new, parent, before, False)
        advance_pointer(store, parent)
        before, tensors = tensors, stepped(tensors)
    return tmp_path / "run"


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_list_shows_the_kept_versions(run: Path, capsys):
    assert main(["weights", "list", str(run), "--json"]) == 0
    found = lines(capsys)
    assert [one["kind"] for one in found] == ["anchor", "delta", "delta"]
    assert [one["believed"] for one in found] == [False, False, True]
    assert main(["weights", "list", str(run / "store")]) == 0
    shown = capsys.readouterr().out
    assert all(str(Version(number, 1)) in shown for number in range(VERSIONS))


@pytest.fixture
def draft(run: Path) -> WeightStream:
    """A named stream beside the policy's."""
    stream, bus = WeightStream("draft"), MemoryBus()
    publish_small(bus, FileStore(run / "store"), "run", stream, [0, 4])
    return stream


def test_the_versions_of_named_streams_are_listed_verified_and_exported(
    run: Path, draft: WeightStream, tmp_path: Path, capsys
) -> None:
    assert main(["weights", "list", str(run), "--json"]) == 0
    shown = [(one["stream"], one["version"], one["believed"]) for one in lines(capsys)]
    assert shown[VERSIONS:] == [
        ("draft", str(Version(0, 1)), False), ("draft", str(Version(4, 1)), True)
    ]  # fmt: skip
    assert {stream for stream, _, _ in shown[:VERSIONS]} == {""}
    assert main(["weights", "list", str(run), "--stream", "draft"]) == 0
    assert capsys.readouterr().out.count("draft v0000") == 2
    assert main(["weights", "show", "latest", str(run), "--stream", "draft", "--json"]) == 0
    (line,) = lines(capsys)
    assert line["version"] == str(Version(4, 1))
    assert main(["weights", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("all hashes correct") == VERSIONS + 2
    out = str(tmp_path / "out")
    assert main(["weights", "export", "4", out, str(run), "--stream", "draft"]) == 0
    assert (tmp_path / "out" / "config.json").exists()
    assert main(["weights", "show", "4", str(run)]) == 1
    assert main(["weights", "list", str(run), "--stream", "a/b"]) == 2
    assert "letters, digits and '-'" in capsys.readouterr().err


def test_show_names_every_tensor_and_what_changed(run: Path, capsys):
    assert main(["weights", "show", "latest", str(run), "--json"]) == 0
    (found,) = lines(capsys)
    changed = {one["tensor"]: one["changed"] for one in found["tensor"]}  # pyright: ignore[reportGeneralTypeIssues]
    assert changed["model.norm.weight"] == 3
    assert sum(changed.values()) == 3
    assert main(["weights", "show", "2", str(run)]) == 0
    assert "model.norm.weight" in capsys.readouterr().out


def test_verify_names_the_first_bad_tensor_and_fails(run: Path, capsys):
    assert main(["weights", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("all hashes correct") == VERSIONS
    store = FileStore(run / "store")
    entry = read_manifest(store, Version(1, 1)).delta.tensors["model.norm.weight"]  # pyright: ignore[reportOptionalMemberAccess]
    key = f"{version_folder(Version(1, 1))}/{entry.file}"
    data = bytearray(store.get(key))
    data[entry.end - 1] ^= 1
    store.put(key, data)
    assert main(["weights", "verify", "0", str(run)]) == 0
    capsys.readouterr()
    assert main(["weights", "verify", str(run), "--json"]) == 1
    found = lines(capsys)
    assert [one["ok"] for one in found] == [True, False, False]
    assert "model.norm.weight" in found[1]["problem"]  # pyright: ignore[reportOperatorIssue]
    assert str(Version(1, 1)) in found[2]["problem"]  # pyright: ignore[reportOperatorIssue]


def test_diff_counts_what_changed(run: Path, capsys):
    assert main(["weights", "diff", "0", "2", str(run), "--json"]) == 0
    total, found = lines(capsys)
    assert (total["differ"], total["changed"]) == (1, 3)
    assert (found["tensor"], found["changed"], found["largest"]) == ("model.norm.weight", 3, 2.0)
    assert main(["weights", "diff", "1", "1", str(run)]) == 0
    assert "0 of" in capsys.readouterr().out


def test_transformers_loads_an_exported_delta(run: Path, tmp_path: Path, capsys):
    folder = tmp_path / "out" / "model"
    assert main(["weights", "export", "2", str(folder), str(run)]) == 0
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)  # pyright: ignore[reportGeneralTypeIssues]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert model.model.norm.weight[:4].tolist() == [3.0, 3.0, 3.0, 1.0]
    assert main(["weights", "export", "2", str(folder), str(run)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["show", "9"], 1, "kept are: v00000000-t0001"),
        (["show", "nine"], 2, "'nine' is not a version"),
        (["diff", "0", "v00000009-t0001"], 1, "is not kept"),
    ],
)
def test_a_missing_version_is_reported(run: Path, words, code, expected, capsys):
    assert main(["weights", *words, str(run)]) == code
    assert expected in capsys.readouterr().err


def test_a_folder_without_versions_is_refused_and_nothing_is_made(tmp_path: Path, capsys):
    assert main(["weights", "list", str(tmp_path / "none")]) == 2
    assert "no such run" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
