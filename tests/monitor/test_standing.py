"""A run in one line: what `rollstream ls` prints of it, from a few small reads."""

import shutil
import time

import pytest

from rollstream.look.monitor.observer import run_standing
from rollstream.look.monitor.progress import standing_of
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.metrics_file import MetricsFile
from tests.support import planted_states as planted
from tests.support.planted_states import NOW_S


def standing(folder: RunFolder, now_s: float):
    return run_standing(load(folder.configuration), folder, now_s)


def test_a_run_with_a_log_has_its_step_and_its_last_news(run_folder):
    now_s = time.time()
    found = standing(run_folder, now_s)
    assert (found.step, found.steps) == (60, 60)
    assert found.newest_s == pytest.approx(now_s, abs=600)
    assert standing(run_folder, now_s + 3600).state == "finished"


def test_a_prepared_run_is_new_and_gets_no_log_from_being_looked_at(tmp_path):
    folder = RunFolder(tmp_path / "run")
    write_configuration(folder, Configuration(folder=str(folder.path)))
    assert standing(folder, NOW_S).state == "new"
    assert not (folder.path / "bus").exists()


def test_the_supervisor_names_the_end_of_a_run(run_folder, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(run_folder.path, path)
    folder = RunFolder(path)
    with MetricsFile(folder.metrics / "supervisor.jsonl") as events:
        events.append({"time_s": NOW_S, "event": "stopped"})
    assert standing(folder, time.time()).state == "stopped"


def test_after_the_last_step_a_run_without_evaluation_is_ending():
    state = planted.healthy()
    last = state.steps[-1].step
    assert standing_of(state, last, NOW_S).phase == "last evaluation"
    assert standing_of(state, last, NOW_S, is_evaluated=False).phase == "ending"


@pytest.mark.parametrize(("later_s", "expected"), [(0.0, "running"), (3600.0, "silent")])
def test_a_run_that_stopped_writing_is_silent(later_s, expected):
    assert standing_of(planted.healthy(), 60, NOW_S + later_s).state == expected


def test_a_finished_run_names_the_newest_version_that_was_evaluated():
    state = planted.healthy()
    done = state.steps[-1].step
    state.events.append({"time_s": NOW_S, "event": "complete"})
    state.evaluations.clear()
    assert standing_of(state, done, NOW_S).phase == "finished"
    state.apply_evaluation({"step": done - 2, "accuracy_sampled": 0.5})
    assert standing_of(state, done, NOW_S).phase == f"finished, evaluated to v{done - 2}"
    state.apply_evaluation({"step": done, "accuracy_sampled": 0.5})
    assert standing_of(state, done, NOW_S).phase == "finished"
