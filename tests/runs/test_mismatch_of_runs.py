"""A whole run on the embedded engine: engine and trainer agree about every comparable token."""

from pathlib import Path

from rollstream.consumers.settings import DispatchSettings
from rollstream.look.monitor.concerns import warnings_of
from rollstream.look.monitor.snapshot import run_settings_of, take_snapshot
from rollstream.run.config.settings import Configuration
from rollstream.streams.records import StepDone
from tests.support.tiny_run import tiny_run


def test_engine_and_trainer_agree_in_a_run_without_a_warning(tmp_path: Path) -> None:
    """Without lag every trained token is compared, in the first of two updates."""
    dispatch = DispatchSettings(max_lag=0, heartbeat_timeout_s=1.0)
    with tiny_run(tmp_path, dispatch=dispatch, trainer={"updates_per_step": 2}) as run:
        run.start_all()
        assert run.train()
        run.end()
        steps = run.records("ledger", StepDone)
    assert len(steps) == 4
    for done in steps:
        assert done.metrics["mismatch_tokens/remainder"] > 0
        assert done.metrics["mismatch_max/remainder"] < 1e-4
        assert done.metrics["mismatch_above/remainder"] == 0
    plan = run_settings_of(Configuration.model_validate({"weights": {"dtype": "float32"}}))
    state = plan.state()
    for done in steps:
        state.apply(done, done.time_s)
    seen = take_snapshot(state, plan, steps[-1].time_s)
    assert seen.mismatch["remainder"].tokens > 0
    assert not [one for one in warnings_of(seen) if one.kind.startswith("mismatch")]
