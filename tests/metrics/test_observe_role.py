"""`rollstream observe` serves the concerns of a run that it only reads, and ends with the run."""

import time
from pathlib import Path

from rollstream.run.config.recorded_configuration import record_configuration
from rollstream.run.metrics.endpoint import endpoint_file
from rollstream.storage.identity import read_or_create_identity
from testbed.oncall import records
from testbed.oncall.planted_run import RUN, PlantedRun
from testbed.run_driver import RunDriver
from testbed.scraping import endpoint, scrape, value
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
    planted = PlantedRun(folder, term=1)
    records.apply_healthy(planted)
    steps = planted.configuration.trainer.steps + 5
    trainer = planted.configuration.trainer.model_copy(update={"steps": steps})
    read_or_create_identity(planted.store, RUN)
    changed = planted.configuration.model_copy(update={"trainer": trainer})
    record_configuration(planted.store, changed)
    objects = sorted((folder / "store").rglob("*"))
    with RunDriver(folder, vital=("observe",)) as run:
        run.start("observe")
        run.wait_for(lambda: raised(folder))
        assert raised(folder) == {"run_silent"}
        found = scrape(endpoint(folder, "observe")["url"])
        assert value(found, "rollstream_run_step", role="observe") == records.STEPS
        assert value(found, "rollstream_run_steps_wanted") == steps
        assert value(found, "rollstream_run_step_age_seconds") > 1e7
        wait_for_iteration(run, "observe")
        planted.note("supervisor.jsonl", {"time_s": time.time(), "event": "failed"})
        run.wait_for(lambda: raised(folder) == {"run_failed"})
        planted.note("supervisor.jsonl", {"time_s": time.time(), "event": "complete"})
        run.newest("observe").wait()
    assert sorted((folder / "store").rglob("*")) == objects  # it wrote nothing
    planted.close()
