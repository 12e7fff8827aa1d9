"""Runs that start from an adapter (`model.lora.path`)."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollstream.errors import ConfigurationError
from rollstream.producers.dialogue.text_tokenizer import byte_tokenizer
from rollstream.run.checks.model import ModelFacts, model_findings
from rollstream.run.cli.configuration import load_configuration
from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.run.config.run_model import store_starting_model
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.train import starting_model
from rollstream.storage.model_folder.hf_folder import ADAPTER_CONFIG, ADAPTER_TENSORS
from rollstream.storage.model_folder.lora import adapter_state, attach_adapters
from rollstream.storage.settings import LoraSettings
from rollstream.storage.starting_model.models import build_model
from rollstream.storage.stores.connect import open_store
from tests.support.kept_run import made
from tests.support.tiny_run import SIZES

LORA = LoraSettings(rank=2, alpha=4.0)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of a run's last version, exported."""
    run = made(tmp_path_factory.mktemp("run"), lora=LORA)
    folder = run.parent / "adapter"
    assert main(["weights", "export", str(run), "latest", "--out", str(folder)]) == 0
    return folder


def exported(run: Path, version: str, out: Path) -> dict[str, torch.Tensor]:
    assert main(["weights", "export", str(run), version, "--out", str(out)]) == 0
    return load_file(out / ADAPTER_TENSORS)


def test_version_0_is_the_adapter_and_training_goes_on_from_it(adapter: Path, tmp_path: Path):
    run = made(tmp_path / "run", lora=LORA.model_copy(update={"path": str(adapter)}))
    begun, before = exported(run, "0", tmp_path / "v0"), load_file(adapter / ADAPTER_TENSORS)
    assert begun.keys() == before.keys()
    assert all(torch.equal(begun[name], before[name]) for name in begun)
    last = exported(run, "latest", tmp_path / "last")
    assert any(not torch.equal(last[name], before[name]) for name in last)
    assert main(["replay", str(run), "--from-step", "5", "--out", str(tmp_path / "again")]) == 0


def test_the_adapter_is_in_the_runs_store_for_hosts_without_its_folder(
    adapter: Path, tmp_path: Path
):
    own, base = tmp_path / "own", tmp_path / "base"
    shutil.copytree(adapter, own)
    build_model("Qwen3ForCausalLM", SIZES, seed=0).save_pretrained(base)
    byte_tokenizer().save(str(base / "tokenizer.json"))
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{base}"\n[model.lora]\npath = "{own}"\n')
    c = load(path, [f"store=file:{tmp_path}/store"], {})
    store_starting_model(open_store(c.store), c, tmp_path / "here")
    shutil.rmtree(own)
    other = Namespace(
        command="config",
        configuration=str(path),
        overrides=[f"store={c.store}"],
        seed=None,
        run=str(tmp_path / "there"),
    )
    assert load_configuration(other)[0].model == c.model
    assert not (tmp_path / "there").exists()
    other.overrides = [f"store=file:{tmp_path}/empty"]
    with pytest.raises(ConfigurationError, match="this host has no folder"):
        load_configuration(other)
    model = starting_model(c, tmp_path / "there")
    assert isinstance(model, torch.nn.Module)
    begun, before = adapter_state(model.state_dict()), load_file(adapter / ADAPTER_TENSORS)
    assert begun.keys() == before.keys()
    assert all(torch.equal(begun[name], before[name]) for name in begun)


def test_rank_alpha_and_targets_are_those_of_the_adapter(adapter: Path, tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "m"\n[model.lora]\npath = "{adapter}"\n')
    lora = load(path, environment={}).model.lora
    assert (lora.rank, lora.alpha) == (2, 4.0)
    assert lora.targets == tuple(
        sorted(json.loads((adapter / ADAPTER_CONFIG).read_text())["target_modules"])
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not trained here"),
        ({"use_rslora": True}, "use_rslora = True is not trained here"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"r": 0}, "r = 0 must be a whole number from 1 to 512"),
        ({"target_modules": ".*_proj"}, "target_modules = '.*_proj' must be a list"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_its_field(
    adapter: Path, tmp_path: Path, changed: dict[str, object], message: str
):
    own = tmp_path / "own"
    shutil.copytree(adapter, own)
    fields = json.loads((own / ADAPTER_CONFIG).read_text()) | changed
    (own / ADAPTER_CONFIG).write_text(json.dumps(fields))
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "m"\n[model.lora]\npath = "{own}"\n')
    with pytest.raises(ConfigurationError, match=message.replace("*", r"\*")):
        load(path, environment={})


def test_a_tensor_of_another_shape_is_refused_by_name(adapter: Path, tmp_path: Path):
    own = tmp_path / "own"
    shutil.copytree(adapter, own)
    tensors = load_file(own / ADAPTER_TENSORS)
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name][:, :1].contiguous()}, own / ADAPTER_TENSORS)
    with pytest.raises(ConfigurationError, match=f"{name} has the shape"):
        attach_adapters(
            build_model("Qwen3ForCausalLM", SIZES, seed=0), LORA, 0, torch.float32, "tiny", own
        )


def test_an_adapter_with_a_chat_template_of_its_own_is_named(tmp_path: Path):
    base, own = tmp_path / "base", tmp_path / "own"
    for folder in (base, own):
        folder.mkdir()
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    model = {"path": str(base), "lora": {"path": str(own), "rank": 2}}
    facts = ModelFacts(base, {}, 0, 0, (), ())

    def warnings(**task: object) -> list[str]:
        c = Configuration.model_validate({"model": model, "task": task})
        found = model_findings(c, facts, True, False)
        return [finding.text for finding in found if finding.verdict == "warning"]

    assert not warnings()
    (own / "chat_template.jinja").write_text("### {{ messages }}")
    assert f"set task.tokenizer = '{own}'" in warnings()[0]
    assert not warnings(tokenizer=str(base))
