"""A holder that was taken for dead resumes in the middle of a write: invariants 1, 2, 6 and 7 hold,
it exits, and the run reaches its end.
"""

from pathlib import Path

import pytest

from rollstream.run.config.config import load, truncates_log
from rollstream.run.config.run_folder import store_url
from rollstream.storage.stores.connect import open_store
from testbed.run_process import assert_the_log_adds_up, by_hand
from testbed.servers import kafka_broker, versity
from tests.fencing.zombies import (
    AT_ORDERS,
    AT_TRUTH,
    EXTRA,
    ONE_EACH,
    SETTINGS,
    ForwardOnly,
    Zombie,
    assert_no_harm,
    haunt,
    start_all,
)

UNARCHIVED = ("append prompts", "append assignments")
"""For these roles void records cannot be counted afterwards in the part that dispatch truncated.
"""


def places(back_end: str) -> list[str]:
    """Settings of the log and the store. The recount reads no bucket, and assignments have no
    archive that would keep the void ones, so nothing is truncated there.
    """
    if back_end.startswith("embedded"):
        return ["truncate=false"] if "whole" in back_end else []
    return [f"bus={kafka_broker.new_url()}", f"store={versity.new_url()}", "truncate=false"]


def haunted(folder: Path, model: Path, back_end: str, zombies: tuple[Zombie, ...]) -> None:
    """Each of them stops at its own write and its successor takes over; then it resumes."""
    more = [setting for zombie in zombies for setting in EXTRA.get(zombie.name, ())]
    with by_hand(folder, model, [*SETTINGS, *more, *places(back_end)]) as run:
        configuration = load(folder / "config.json")
        forward = ForwardOnly(open_store(store_url(configuration, folder)))
        processes = start_all(run, zombies)
        forward()
        haunt(run, zombies, processes)
        run.wait_complete(forward)
    found = assert_no_harm(folder)
    assert_the_log_adds_up(folder, configuration.trainer.steps)
    forgotten = UNARCHIVED if truncates_log(configuration) else ()
    kept = [zombie for zombie in zombies if zombie.voids and zombie.kind not in forgotten]
    assert found.void >= len(kept)


@pytest.mark.slow
def test_zombies_of_every_role_in_one_run_do_no_harm(tmp_path: Path, model: Path) -> None:
    haunted(tmp_path / "run", model, "embedded", ONE_EACH)


@pytest.mark.long
@pytest.mark.parametrize(
    ("back_end", "zombies"),
    [
        pytest.param("embedded", AT_TRUTH, id="embedded-swaps-and-relay"),
        pytest.param("embedded, whole", AT_ORDERS, id="embedded-orders-and-scorer"),
        pytest.param("cloud", ONE_EACH, id="cloud-every-role"),
        pytest.param("cloud", AT_TRUTH, id="cloud-swaps-and-relay"),
        pytest.param("cloud", AT_ORDERS, id="cloud-orders-and-scorer"),
    ],
)
def test_zombies_at_other_writes_and_over_kafka_and_s3_do_no_harm(
    tmp_path: Path, model: Path, back_end: str, zombies: tuple[Zombie, ...]
) -> None:
    haunted(tmp_path / "run", model, back_end, zombies)
