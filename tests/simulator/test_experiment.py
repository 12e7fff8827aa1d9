"""From a file to results: every mistake is named, constants have their documented meaning, pages
and lines hold the simulated results.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.paced.lengths import LogNormal
from rollstream.producers.engines.roofline import Roofline, batch_max
from rollstream.run.cli.main import main
from rollstream.simulator.cluster import Cluster, Job, cluster_of, constant_values
from rollstream.simulator.constants import CONSTANTS, MODELS
from rollstream.simulator.experiment import RunPolicy, predict
from rollstream.simulator.policies import SYNCHRONOUS, policy_of
from rollstream.simulator.workload import AnswerLengths, Workload, read_lengths
from testbed.repository import EXAMPLES
from tests.simulator.small import DRAFTS

QUICK = ("--set", "scale=64", "--set", "constants.steps=4", "--set", "constants.steps_skipped=1")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["simulate", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_example_prints_a_line_per_run_and_draws_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "cluster.html"
    code, out, _ = simulated(
        capsys, str(EXAMPLES / "cluster-1024.toml"), "--json", "--html", str(page), *QUICK,
        "--set", "ablation=null", "--set", 'policies=["synchronous","laminar"]',
    )  # fmt: skip
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(line["gpus"], line["policy"]) for line in lines][-1] == (1024, "laminar")
    assert len(lines) == 6
    assert lines[0]["speed_up"] == 1.0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 6
    assert "://" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('polices = ["laminar"]', "policies"),
        ('policies = ["laminer"]', "'laminer' is unknown"),
        ('ablation = "synchronous-repack"', "no 'repack' to leave out"),
        ("[constants]\ngpu_flop = 1.0", "unknown gpu_flop"),
        ("[constants]\ntrain_mfu = 0.0", "constants.train_mfu must be > 0, got 0"),
        ("[constants]\nsteps_skipped = 10.0", "must be below steps (10)"),
        ('[[clusters]]\nmodel = "qwen9"', "model 'qwen9' is unknown; known: qwen2.5-7b"),
        ('policies = ["laminar"]\n[[clusters]]\ngpus = 1', "both need some"),
        ('[[clusters]]\nmodel = "qwen2.5-72b"\ngpus = 64\ntp = 1', "caches"),
        ('[lengths]\ntrace = "nothing.txt"', "nothing.txt cannot be read"),
        ("[lengths]\nmedian = 3", "median"),
        (
            "[environment]\nturns_mean = 3.0\nwait_median_s = 5.0\nwait_p99_s = 1.0",
            "environment.wait_p99_s must be ≥ wait_median_s (5), got 1",
        ),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str, expected: str
):
    path = tmp_path / "wrong.toml"
    path.write_text(written, encoding="utf-8")
    code, _, err = simulated(capsys, str(path))
    assert code == 2
    assert expected in err


def test_a_page_without_a_folder_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    where = tmp_path / "no" / "page.html"
    code, out, err = simulated(
        capsys, str(EXAMPLES / "cluster-1024.toml"), "--html", str(where), "--json"
    )
    assert (code, out) == (2, "")
    assert "a folder that exists" in err


def test_every_constant_has_a_source_and_every_assumed_one_a_range():
    for name, constant in CONSTANTS.items():
        assert constant.source, name
        assert constant.low <= constant.value <= constant.high, name


def test_a_replica_costs_as_its_constants():
    """7B on one GPU: 15.2 GB at three quarters of 3.35 TB/s, and the rest of the memory for KV."""
    cluster = cluster_of(MODELS["qwen2.5-7b"], 8, 0.5, policy_of("laminar"), constant_values())
    assert cluster.rollouts == 4
    assert cluster.roofline.weights_s == pytest.approx(2 * 7.616e9 / (0.75 * 3.35e12))
    assert cluster.kv_capacity == int((0.9 * 80e9 - 2 * 7.616e9) / (4 * 28 * 4 * 128))
    assert cluster.train_token_s == pytest.approx(8 * 7.616e9 / (4 * 989.4e12 * 0.35))
    shared = cluster_of(MODELS["qwen2.5-7b"], 8, 0.5, SYNCHRONOUS, constant_values())
    assert shared.rollouts == 8
    assert shared.train_token_s == pytest.approx(cluster.train_token_s / 2)


def test_recorded_lengths_come_from_text_and_from_an_archive(tmp_path: Path):
    text = tmp_path / "lengths.txt"
    text.write_text("30\n10 \n# none\n20\n", encoding="utf-8")
    assert read_lengths(str(text), "logprobs").lengths == (10, 20, 30)
    archived = read_lengths(str(EXAMPLES / "archive"), "logprobs").lengths
    assert len(archived) > 10
    assert min(archived) >= 1
    with pytest.raises(ConfigurationError, match="no column colour"):
        read_lengths(str(EXAMPLES / "archive"), "colour")
    with pytest.raises(ConfigurationError, match="neither number nor list"):
        read_lengths(str(EXAMPLES / "archive"), "rollout")


DECODE = Roofline(0.01, 0.0, 0.0)
REAL = Cluster(
    rollouts=2, roofline=DECODE, slots=2, kv_capacity=1_000, batch_max=batch_max(DECODE, 2),
    train_token_s=0.0, train_fixed_s=0.5, update_s=0.0,
)  # fmt: skip
STEPS = Job(groups_per_step=2, steps=4, max_lag=1)


def answers(distribution: LogNormal) -> Workload:
    lengths = AnswerLengths(distribution, correlation=0.7, longest=200)
    return Workload(lengths, samples=2, prompts=192, prompt_tokens=10, seed=0)


def test_a_small_run_is_predicted_as_computed_by_hand():
    """Four waves of 1 s, each of 400 tokens, then half a second of training; the first assignments
    go out at once, the next wait behind them.
    """
    found = predict(REAL, STEPS, answers(LogNormal(100.0, 100.0)), RunPolicy("in_flight"))
    assert found.tokens_per_s == pytest.approx(1600 / 4.5, rel=0.02)
    assert found.idle_share == pytest.approx(0.5 / 4.5, abs=0.02)


def test_a_prediction_knows_drafts_adapters_and_a_bound_on_the_work():
    """Two passes over 192 prompts: the second has earlier answers to draft from."""
    job = Job(groups_per_step=24, steps=16, skip=8, max_lag=2)
    work = replace(answers(LogNormal(50.0, 500.0)), samples=4)
    cluster = replace(REAL, slots=16, kv_capacity=4_000, drafts=DRAFTS)
    plain = predict(cluster, job, work, RunPolicy("keep_version"))
    drafted = predict(cluster, job, work, RunPolicy("keep_version", drafts=True))
    assert drafted.tokens_per_s > 1.2 * plain.tokens_per_s
    draining = replace(cluster, update_s=0.5)
    side_by_side = predict(
        replace(cluster, update_s=0.0), job, work, RunPolicy("keep_version", adapters=True)
    )
    assert (
        side_by_side.tokens_per_s
        > predict(draining, job, work, RunPolicy("keep_version")).tokens_per_s
    )
    assert plain.lag_max <= 2
    free = predict(cluster, job, work, RunPolicy("keep_version", bounded=False))
    assert free.lag_mean > 0


@pytest.mark.parametrize("on_update", ["keep_version", "in_flight", "in_flight_recompute"])
def test_a_prediction_is_of_the_whole_run_and_repeats(on_update: str):
    job, work = replace(STEPS, max_lag=4), answers(LogNormal(50.0, 500.0))
    found = predict(REAL, job, work, RunPolicy(on_update))
    assert predict(REAL, job, work, RunPolicy(on_update)) == found
    assert found.kv_utilisation < 1
    with pytest.raises(ConfigurationError, match="on_update must be one of"):
        predict(REAL, job, work, RunPolicy("later"))
    with pytest.raises(ConfigurationError, match="kv_capacity must hold one answer"):
        predict(replace(REAL, kv_capacity=100), job, work, RunPolicy(on_update))
