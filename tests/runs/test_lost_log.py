"""A run whose log was lost is not continued from its store as if nothing were missing."""

import shutil
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from tests.runs.test_resume_counts import stopped
from tests.support.tiny_run import tiny_run


@pytest.mark.parametrize(
    ("every", "why"),
    [(1, r"ledger/0 ends at 0, and the checkpoint"), (100, r"the store's newest version is")],
    ids=["checkpoint", "versions"],
)
def test_a_trainer_refuses_a_log_without_what_its_store_knows(
    tmp_path: Path, every: int, why: str
) -> None:
    with stopped(tmp_path, 3, checkpoint_every=every):
        pass
    shutil.rmtree(tmp_path / "bus")
    with (
        tiny_run(tmp_path, trainer={"steps": 30}) as run,
        pytest.raises(ConfigurationError, match=f"the log is not that of the store.*: {why}"),
    ):
        run.train(term=2)
