"""The volume that all containers share: in each of them the role is process 1."""

import threading
from pathlib import Path

from rollstream.run.config.config import load
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from testbed.waiting import WAIT_S

TIMES = 15


def test_roles_with_one_process_id_settle_in_one_folder_at_once(tmp_path: Path) -> None:
    """Threads share one process id too."""
    folder, configuration = RunFolder(tmp_path / "volume"), Configuration(run="shared")
    failed: list[BaseException] = []

    def start() -> None:
        try:
            for _ in range(TIMES):
                write_configuration(folder, configuration)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert failed == []
    assert load(folder.configuration, environment={}).run == "shared"
    assert [path.name for path in folder.path.iterdir()] == ["config.json"]
