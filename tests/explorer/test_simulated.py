"""A simulation's configuration opens as runs: steps and swimlanes are the simulator's own."""

import json

import pytest

from rollstream.look.explorer.serving.routes import Explorer
from rollstream.look.explorer.simulation import simulate_runs
from rollstream.plan.simulation_settings import load_simulation
from rollstream.run.cli.main import main
from rollstream.simulator.experiment import run_policies
from rollstream.simulator.saved_runs import load_saved_runs
from testbed.waiting import wait_for

SIMULATION = """
policies = ["synchronous", "laminar"]
scale = 32

[[clusters]]
model = "qwen2.5-7b"
gpus = 256
rollout_share = 0.5
"""


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    path = tmp_path_factory.mktemp("simulation") / "cluster.toml"
    path.write_text(SIMULATION)
    return path


@pytest.fixture(scope="module")
def results(simulation):
    return [run.result for run in run_policies(load_simulation(simulation, ()))]


@pytest.fixture(scope="module")
def ask(simulation, tmp_path_factory):
    """Asks the explorer of both simulated runs."""
    folder = tmp_path_factory.mktemp("simulated")
    found = list(simulate_runs(str(simulation), folder, 8, lambda text: None))
    with Explorer(found, lambda event, data: None) as explorer:
        wait_for(lambda: all(run.index.progress.complete for run in explorer.runs))
        yield lambda path, **given: json.loads(explorer.answer(path, given))


def test_each_policy_is_a_finished_simulated_run(ask, results):
    runs = ask("runs")["runs"]
    assert [run["name"] for run in runs] == ["synchronous-qwen2.5-7b-256", "laminar-qwen2.5-7b-256"]
    assert all(run["simulated"] and run["phase"] == "finished" for run in runs)
    assert [run["span"] for run in runs] == [[0.0, result.seconds] for result in results]


def test_steps_are_those_of_the_simulator(ask, results):
    steps = ask("r/1/steps")["steps"]
    assert {s["step"]: (s["tokens_trained"], s["trajectories"]) for s in steps} == {
        step.number: (step.tokens, step.samples) for step in results[1].steps
    }
    lags = ask("r/1/steps/5")["lags"]
    assert {one["lag"]: one["tokens"] for one in lags} == dict(results[1].steps[4].lags)


def test_lanes_cover_the_time_in_which_a_rollout_decoded(ask, results):
    z = 30
    tile = ask("r/1/lanes", z=str(z), i="0")
    assert tile["lanes"][1:] == [row.name for row in results[1].rows]
    width = 2.0**z / tile["bins"]["count"]
    for lane, row in enumerate(results[1].rows, 1):
        decoded_s = sum(end - start for start, end, _ in row.bars)
        shown_s = width * sum(cell[2] for cell in tile["bins"]["cells"] if cell[0] == lane)
        assert shown_s == pytest.approx(decoded_s, abs=width * 0.001)
    assert len(tile["steps"]) == len(results[1].steps)


def test_runs_without_hashes_are_not_called_equal(ask):
    assert not ask("compare")["has_hashes"]
    found = ask("compare/steps/5")
    assert (found["same_state"], found["same_members"]) == (None, None)


def test_settings_have_the_figures_and_an_audit_is_refused(ask, results):
    shown = {one["name"]: one["value"] for one in ask("r/0/settings")["settings"]}
    assert shown["simulation.policy"] == "synchronous"
    assert float(shown["simulation.tokens_per_s"]) == round(results[0].tokens_per_s, 1)
    wait_for(lambda: ask("r/0/audit")["state"] != "running")
    assert "simulated" in ask("r/0/audit")["message"]


def test_a_run_s_own_configuration_is_not_simulated(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text('run = "quickstart"\n')
    assert main(["explore", str(path), "--no-browser"]) == 2
    assert "use it with rollstream run" in capsys.readouterr().err


def test_what_the_command_saved_opens_with_the_same_results(simulation, results, tmp_path, capsys):
    saved = tmp_path / "saved"
    assert main(["simulate", str(simulation), "--save", str(saved)]) == 0
    assert "simulation.json" in capsys.readouterr().out
    assert [run.result for run in load_saved_runs(saved / "simulation.json")] == results
    exported = tmp_path / "exported"
    assert main(["explore", str(saved), "--export", str(exported)]) == 0
    assert (exported / "index.html").is_file()


def test_a_damaged_file_of_saved_runs_is_refused_with_its_place(tmp_path, capsys):
    path = tmp_path / "simulation.json"
    path.write_text(json.dumps({"kind": "rollstream-simulation/1", "runs": [{"share": 1}]}))
    assert main(["explore", str(path), "--no-browser"]) == 2
    assert "damaged: 0.cluster" in capsys.readouterr().err
