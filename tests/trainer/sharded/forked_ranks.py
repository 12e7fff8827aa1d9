"""A process that has imported what a rank needs and forks ranks from there: `RankForks` starts it,
and `ForkedRank` is one of its children. Torch and transformers take seconds of CPU to import, which
would be most of what a rank costs.
"""

import functools
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.errors import RollstreamError
from testbed.repository import ROOT
from testbed.servers.guard import keep
from testbed.waiting import wait_for


class RankForks:
    """Starts the process, which answers one request at a time and ends with this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        keep(self._process.pid)

    def start(self, log: Path, environment: Mapping[str, str], words: Sequence[str]) -> int:
        """Returns the id of a new rank, which gets these arguments of `sharded_process.main`."""
        return self._ask({"log": str(log), "environment": dict(environment), "words": [*words]})

    def exit_code(self, pid: int) -> int | None:
        return self._ask({"poll": pid})

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks ranks has ended"
        return json.loads(line)


@functools.cache
def forks() -> RankForks:
    """The one of this process."""
    return RankForks()


class ForkedRank:
    """A rank, with what a `Popen` has."""

    def __init__(self, log: Path, environment: Mapping[str, str], words: Sequence[str]) -> None:
        log.touch(0o600)  # who started it may read it at once
        self.pid = forks().start(log, environment, words)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = forks().exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        wait_for(lambda: self.poll() is not None)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve() -> None:
    """Answers requests until stdin ends; then its ranks end, too."""
    from tests.trainer.sharded import sharded_process  # the imports that forks share

    gc.freeze()
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            children.discard(pid)
            continue
        child = os.fork()
        if child == 0:
            _become(request, sharded_process.main)
        children.add(child)
        print(child, flush=True)
    for child in children:
        os.kill(child, signal.SIGKILL)


def _become(request: dict[str, Any], main: Any) -> None:
    """Becomes the rank, and never returns."""
    code = 1
    try:
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], _LOG, 0o600)
        for descriptor, number in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, number)
        os.environ.clear()
        os.environ.update(request["environment"])
        logging.basicConfig(level=logging.INFO)
        folder, timeout_s, changed, *jobs = request["words"]
        main(Path(folder), float(timeout_s), json.loads(changed), jobs)
        code = 0
    except RollstreamError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except BaseException:  # noqa: BLE001  a fork must not continue in the loop of `serve`
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_LOG = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

if __name__ == "__main__":
    serve()
