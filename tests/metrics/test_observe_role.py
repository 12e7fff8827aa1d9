"""`rollstream observe` serves the concerns of a run that it only reads, and ends with the run."""

import sys
import time
from pathlib import Path

from rollstream.run.config.recorded_configuration import record_configuration
from rollstream.run.metrics.endpoint import endpoint_file
from rollstream.storage.identity import read_or_create_identity
from testbed.oncall import records
from testbed.oncall.planted_run import RUN, PlantedRun
from testbed.run_process import running
from testbed.scraping import endpoint, scrape, value
from testbed.waiting import WAIT_S, wait_for
from tests.metrics.live_run import wait_for_iteration


def raised(folder: Path) -> set[str]:
    """The names of the concerns that last; none before the endpoint serves any."""
    if not endpoint_file(folder, "observe").exists():
        return set()
    found = scrape(endpoint(folder, "observe")["url"]).get("rollstream_concern", [])
    return {labels["name"] for labels, lasts in found if lasts}


def test_the_role_serves_the_concerns_of_a_run_and_ends_with_it(tmp_path: Path) -> None:
    """By the clock of this machine the planted run has been silent for years. Its trainer has
    recorded more steps than the role's own settings have.
    """
    folder = tmp_path / "run"
    run = PlantedRun(folder, term=1)
    records.apply_healthy(run)
    steps = run.configuration.trainer.steps + 5
    trainer = run.configuration.trainer.model_copy(update={"steps": steps})
    read_or_create_identity(run.store, RUN)
    record_configuration(run.store, run.configuration.model_copy(update={"trainer": trainer}))
    objects = sorted((folder / "store").rglob("*"))
    line = [sys.executable, "-m", "rollstream", "observe", str(run.folder.configuration)]
    with running(line, tmp_path / "output.txt") as process:
        wait_for(lambda: raised(folder), process, (tmp_path / "output.txt").read_text)
        assert raised(folder) == {"run_silent"}
        found = scrape(endpoint(folder, "observe")["url"])
        assert value(found, "rollstream_run_step", role="observe") == records.STEPS
        assert value(found, "rollstream_run_steps_wanted") == steps
        assert value(found, "rollstream_run_step_age_seconds") > 1e7
        wait_for_iteration(folder, "observe", process)
        run.note("supervisor.jsonl", {"time_s": time.time(), "event": "failed"})
        wait_for(
            lambda: raised(folder) == {"run_failed"}, process, (tmp_path / "output.txt").read_text
        )
        run.note("supervisor.jsonl", {"time_s": time.time(), "event": "complete"})
        assert process.wait(WAIT_S) == 0
    assert sorted((folder / "store").rglob("*")) == objects  # it wrote nothing
    run.close()
