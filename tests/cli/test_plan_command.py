"""`rollstream plan`: one JSON object, a configuration that loads, and one line for a question that
makes no plan.
"""

import json
from pathlib import Path

import pytest

from rollstream.errors import EXIT_REFUSED
from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.run.sizes import arithmetic as sums
from rollstream.run.sizes.arithmetic import total
from rollstream.run.sizes.check import needed_bytes
from rollstream.run.sizes.shapes import SHAPES
from rollstream.run.supervisor.cards import GpuCard
from testbed.repository import EXAMPLES

QWEN = {"model_type": "qwen2", "max_position_embeddings": 32_768}


def test_a_plan_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen2.5-7b", "--gpus", "8xH100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["version_bytes"]["full"] == 2 * found["parameters"]
    assert found["trainer_gpus"] + found["rollouts"] * found["tensor_parallel"] == 8
    assert sum(found["trainer_bytes"].values()) <= found["trainer_usable_bytes"]
    assert set(found["seconds"]["delta"]) == {"publish", "fetch", "relay", "load"}


def test_the_written_configuration_is_one_that_run_takes(tmp_path: Path) -> None:
    file, model = tmp_path / "plan.toml", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN))
    assert main(["plan", "qwen2.5-0.5b", "--gpus", "1x24GB", "--toml", str(file), "--json"]) == 0
    c = load(file, [f"model.path={model}"], {})
    assert (c.devices.trainer, c.devices.rollouts) == ((0,), (0,))
    assert c.rollouts.vllm.memory_share < 0.85


def test_a_mixture_of_experts_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3-30b-a3b", "--gpus", "8xH200"]) == EXIT_REFUSED
    assert "qwen3-30b-a3b is a mixture of 128 experts" in capsys.readouterr().err


def test_kinds_on_which_nothing_fits_exit_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-405b", "--gpus", "8xL4,8xL40S"]) == 1
    assert "no assignment of 8 x L4, 8 x L40S" in " ".join(capsys.readouterr().out.split())


def test_a_plan_that_does_not_fit_is_reported_and_exits_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "qwen2.5-3b", "--gpus", "1x24GB"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "does not fit: trainer needs" in text
    assert "with that change" in text


def test_a_plan_for_several_kinds_states_roles_and_prices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["qwen2.5-7b", "--gpus", "8xH100@2.5,16xL40S@0.9", "--toml", str(tmp_path / "a.toml")]
    assert main(["plan", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "8 x H100: 8 train" in text
    assert "16 x L40S: 16 x 1 generate" in text
    assert "price: 34.40 an hour" in text
    assert "all treated alike" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a-rollouts-l40s.toml", "a-trainer-h100.toml",
    ]  # fmt: skip
    assert main(["plan", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [kind["trainer_gpus"] for kind in found["kinds"]] == [8, 0]
    per_s = min(found["train_tokens_per_s"], found["rollout_tokens_per_s"])
    assert found["tokens_per_s"] == per_s
    assert found["price_per_million_tokens"] == pytest.approx(34.4 / 3600 / per_s * 1e6)


def test_one_kind_with_a_price_states_the_price_of_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "qwen2.5-7b", "--gpus", "8xH100@2.5"]) == 0
    assert "price: 20.00 an hour" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("gbps", "waits"), [("100", True), ("3200", False)])
def test_a_trainer_that_waits_for_the_network_is_reported(
    gbps: str, waits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["llama-3.1-405b", "--gpus", "1024xH200", "--network-gbps", gbps]
    assert main(["plan", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("training waits for the network between machines" in text) == waits


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["qwen2.5-7b", "--gpus", "8xK80"], "known cards"),
        (["qwen2.5-70b", "--gpus", "8xH100"], "nearest: qwen2.5-7"),
        (["qwen2.5-7b", "--gpus", "8xH100", "--context", "1"], "--context must lie in"),
        (["qwen2.5-7b", "--gpus", "8xH100", "--store-gbps", "0"], "--store-gbps must be > 0"),
        (["qwen2.5-7b", "--gpus", "8xH100,8x24GB"], "the speed of 24GB is unknown"),
        (["qwen2.5-7b", "--gpus", "8xH100@2,8xL4", "--best", "price"], "price of one L4"),
    ],
)
def test_a_question_that_makes_no_plan_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_example_of_one_gpu_fits_24_gb(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    c = load(EXAMPLES / "one-gpu.toml", [f"model.path={tmp_path}"], {})
    shape, card = SHAPES["qwen2.5-0.5b"], GpuCard("0", "RTX 4090", 24e9)
    form = sums.form_of(c.trainer, ranks=1)
    trainer = total(sums.trainer_lines(shape, form)) / (1 - sums.FRAGMENTED)
    rollout = needed_bytes(c, shape, "rollout-0", card)
    assert trainer + rollout + 2 * sums.CONTEXT_BYTES <= card.memory
