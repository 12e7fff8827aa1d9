"""Runs `rollstream explore` beside a run (`--explore`). Its default priority is below that of all
roles.
"""

import sys
from contextlib import suppress

from rich.console import Console

from rollstream.errors import ConfigurationError
from rollstream.look.explorer.serving.address import bind
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.supervisor.process import ChildProcess, ProcessSpec


class ExplorerProcess:
    """Serves the run in `folder` while the block is entered; its output is in `logs/explore.log`.
    The URL is printed to the console.
    """

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self._folder, self._console = folder, console
        self._child: ChildProcess | None = None

    def __enter__(self) -> "ExplorerProcess":
        # The explorer only watches: a failure to start it changes nothing of the run.
        with suppress(ConfigurationError, OSError):
            bound = bind("127.0.0.1", None)
            port = bound.getsockname()[1]
            bound.close()
            command = [sys.executable, "-P", "-m", "rollstream", "explore", str(self._folder.path)]
            spec = ProcessSpec("explore", [*command, "--port", str(port)])
            self._child = ChildProcess(spec, self._folder.logs / "explore.log", {}, None)
            url = f"http://127.0.0.1:{port}/"
            self._console.print(f"explorer: {url}", soft_wrap=True, highlight=False)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._child is not None:
            self._child.kill()
