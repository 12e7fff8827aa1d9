"""Settings and model of the runs of `examples/quickstart.toml` that several benchmarks start."""

import shutil
from pathlib import Path

from testbed.repository import EXAMPLES
from testbed.run_driver import RunDriver

QUICKSTART = EXAMPLES / "quickstart.toml"
ASYNC = ["evaluation.enabled=false", "weights.keep_every=1", "weights.versions_max=80"]
"""Trains only; versions are kept, so that they can be evaluated afterwards."""


def warm_model(base: Path, example: Path = QUICKSTART) -> Path:
    """Returns the warm model of seed 0 of this example in `base`; it is made if it is not there."""
    model, made = base / "warm" / "model", base / "warm-run"
    if not model.is_dir():
        shutil.rmtree(made, ignore_errors=True)
        with RunDriver(made, example, ["trainer.steps=1", "evaluation.enabled=false"]) as run:
            run.start()
            run.wait_complete(bound_s=1800)
        model.parent.mkdir(parents=True, exist_ok=True)
        (made / "model").rename(model)
        shutil.rmtree(made)
    return model
