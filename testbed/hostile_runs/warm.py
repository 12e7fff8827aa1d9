"""Runs commands in forks of one process that has imported everything (`ForkingInterpreter`): the
benchmark of thousands of calls waits for no imports. A command's own imports are thus not seen by
it; `trial.RealProcesses` sees them.

The forking process (`python -P -m testbed.hostile_runs.warm`) reads one JSON object a line, forks,
answers with the child's id, and then with its exit code. Both processes die with their parents,
also by `kill -9` and while a command runs.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from rollstream.run.supervisor.process import PARENT_VARIABLE, end_with_parent
from testbed.hostile_runs.scene import Scene
from testbed.hostile_runs.trial import bound_resources, working_folder
from testbed.repository import ROOT

LIBRARIES = ("torch", "transformers", "duckdb", "pyarrow.parquet", "boto3", "kafka", "numpy")
SKIPPED = ("vllm", "__main__", "sharded.rank_process")


class ForkedChild:
    """A command in a fork."""

    def __init__(self, interpreter: "ForkingInterpreter", pid: int) -> None:
        self._interpreter, self._code = interpreter, None
        self.pid = pid

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._interpreter.exit_code()
        return self._code

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkingInterpreter:
    """Starts the forking process, which ends with this object; one child runs at a time."""

    def __init__(self, home: Path) -> None:
        environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}
        environment[PARENT_VARIABLE] = str(os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "testbed.hostile_runs.warm"],
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=home,
        )
        assert self._line() == "ready"

    def start(self, words: list[str], scene: Scene, output: Path) -> ForkedChild:
        output.write_bytes(b"")  # the caller may read it before the fork writes it
        job = {
            "words": words,
            "folder": str(working_folder(scene)),
            "environment": scene.environment(),
            "path": [str(scene.site)],
            "output": str(output),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        return ForkedChild(self, int(self._line()))

    def exit_code(self) -> int | None:
        """Returns the exit code of the present child; None while it runs."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], 0)
        return int(self._line()) if readable else None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # its child still runs, and is bounded by its CPU time
            self._process.kill()
            self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        assert line, "the forking interpreter ended"
        return line


def serve() -> None:
    """Forks for each job on stdin until it ends. It dies with its parent, and the fork with it: a
    command that serves or waits would else keep both for ever.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all()
    gc.freeze()
    print("ready", file=answers, flush=True)
    parent = os.getpid()
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            answers.close()
            _run(json.loads(line), parent)
        print(child, file=answers, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    os._exit(0)  # no library gets to complain about what it leaves


def _import_all() -> None:
    """Imports every module of the program that this environment can import."""
    for name in LIBRARIES:
        importlib.import_module(name)
    package = importlib.import_module("rollstream")
    for module in pkgutil.walk_packages(package.__path__, "rollstream.", lambda name: None):
        if not any(word in module.name for word in SKIPPED):
            try:
                importlib.import_module(module.name)
            except ImportError:  # an extra that is not installed
                continue


def _run(job: dict[str, Any], parent: int) -> None:
    """Becomes the command, and never returns."""
    code = 1
    try:
        with open(job["output"], "wb") as file, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        sys.path.extend(job["path"])
        sys.argv = ["rollstream", *job["words"]]
        tempfile.tempdir = None
        bound_resources(parent)
        code = _command(job["words"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def _command(words: list[str]) -> int:
    from rollstream.run.cli.main import main

    try:
        return main(words)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 1
    except BaseException:  # noqa: BLE001  the boundary of a process, which prints it
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]


if __name__ == "__main__":
    serve()
