"""A run under test (`RunDriver`): its supervisor, or each of its roles, is started as a process of
a host, waited for, killed, started again and audited. Import it as `testbed.run_driver` everywhere.

A host determines how a command line becomes a process: this machine with its own program (`HERE`)
or another one (`Machine`), a network namespace (`testbed/hosts`). A run in containers has the same
methods (`testbed/stack/whole_run.py`).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import psutil

from rollstream.run.role_catalogue import ROLES
from rollstream.storage.metrics_file import read_metrics
from testbed.kills.aims import AimFolder
from testbed.waiting import WAIT_S, wait_for

Value = TypeVar("Value")
SUPERVISOR = "run"
"""The name of the process that starts all others of its run."""
_COMMANDS = {"trainer": "train", "scorer": "score"}
# As a supervisor starts its roles.
_ROLE_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class RunFailed(RuntimeError):
    """A process ended with another exit code than it should; the message has its output."""


class Host(Protocol):
    """A place where processes of a run are started."""

    def start(
        self, line: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Start the command line; its output is appended to `log`, and `environment` is added to
        that of the host.
        """
        ...


@dataclass(frozen=True)
class Machine:
    """This machine. `environment` is all that its processes get (None: that of this process), and
    `folder` the working directory, which has the program.
    """

    environment: Mapping[str, str] | None = None
    folder: Path | None = None

    def start(
        self, line: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        with log.open("ab") as output:
            return subprocess.Popen(
                line,
                cwd=self.folder,
                env=self._whole | {**environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(
        self, *words: str, code: int | None = 0, bound_s: float = WAIT_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs `rollstream` with these words; returns what it printed. Raises `RunFailed` if it
        ends with another exit code (None: any is right).
        """
        done = subprocess.run(
            [sys.executable, "-m", "rollstream", *words],
            cwd=self.folder,
            env=self._whole,
            capture_output=True,
            text=True,
            timeout=bound_s,
            check=False,
        )
        if code is not None and done.returncode != code:
            printed = done.stdout[-2000:] + done.stderr[-3000:]
            raise RunFailed(f"{' '.join(words)} ended with {done.returncode}: {printed}")
        return done

    @property
    def _whole(self) -> dict[str, str]:
        return dict(os.environ if self.environment is None else self.environment)


HERE = Machine()


@dataclass(eq=False)
class RunProcess:
    """A process of a run; `log` has its output, after that of others before `begin`."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    begin: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_bytes()[self.begin :].decode(errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, code: int | None = 0, bound_s: float = WAIT_S) -> int:
        """Returns its exit code. Raises `RunFailed` if that is another one (None: any is right)."""
        returned = self.process.wait(bound_s)
        if code is not None and returned != code:
            raise RunFailed(self.describe())
        return returned

    def stop(self, number: signal.Signals = signal.SIGTERM, bound_s: float = WAIT_S) -> int:
        """Ends it in order; returns its exit code."""
        self.send_signal(number)
        return self.wait(None, bound_s)

    def kill(self) -> None:
        """`kill -9` of it alone; its children have ended, too, when this returns."""
        if self.is_over:
            return
        children = psutil.Process(self.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(WAIT_S)
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert not alive, f"{alive} outlived {self.name}"

    def is_stopped(self) -> bool:
        """Returns whether it was stopped by SIGSTOP; a role that ended instead is a failure."""
        assert not self.is_over, self.describe()
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def describe(self) -> str:
        return f"{self.name} ended with {self.process.poll()}:\n{self.text[-3000:]}"


@dataclass
class RunDriver:
    """One run in `folder`, without processes until `start`; all that live are killed at the end of
    a `with` block.

    Every process gets `configuration` (None: the one in its folder) with `settings`. A wait fails
    once the newest process of a name in `vital` has ended. With `aim_folder` a `module` that takes
    aims kills its process at chosen writes.
    """

    folder: Path
    configuration: Path | None = None
    settings: Sequence[str] = ()
    host: Host = HERE
    module: str = "rollstream"
    aim_folder: AimFolder | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    vital: Sequence[str] = (SUPERVISOR,)
    processes: list[RunProcess] = field(default_factory=list[RunProcess])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def aims(self) -> AimFolder:
        assert self.aim_folder is not None, "this run takes no aims"
        return self.aim_folder

    def line(
        self,
        name: str = SUPERVISOR,
        *words: str,
        command: str = "",
        folder: Path | None = None,
        launcher: Sequence[str] = (),
    ) -> list[str]:
        """The command line that `start` starts, behind `launcher`, which has no program itself."""
        folder, prefix = folder or self.folder, name.partition("-")[0]
        command = command or _COMMANDS.get(prefix, prefix)
        line = [sys.executable, "-m", *launcher, self.module, command]
        line += [str(self.configuration or folder / "config.json")]
        line += ["--run", str(folder)] if self.configuration else []
        line += ["--name", name] if command in ROLES else []
        return [*line, *words, *set_words(self.settings)]

    def start(
        self,
        name: str = SUPERVISOR,
        *words: str,
        command: str = "",
        host: Host | None = None,
        folder: Path | None = None,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> RunProcess:
        """Start the supervisor, or a process of a role, whose name begins with the role's unless a
        `command` is given. `folder` is the run's folder on the host.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        line = self.line(name, *words, command=command, folder=folder, launcher=launcher)
        number = sum(one.name == name for one in self.processes)
        log = self.folder.parent / f"{self.folder.name}.{name}-{number}.log"
        begin = log.stat().st_size if log.exists() else 0
        added = {} if name == SUPERVISOR else dict(_ROLE_ENVIRONMENT)
        added |= {**self.environment, **(self.aim_folder.environment() if self.aim_folder else {})}
        process = (host or self.host).start(line, log, added | {**(environment or {})})
        self.processes.append(RunProcess(name, process, log, begin))
        return self.processes[-1]

    def newest(self, name: str = SUPERVISOR) -> RunProcess:
        """The process of this name that was started last."""
        return next(one for one in reversed(self.processes) if one.name == name)

    def living(self, name: str) -> psutil.Process | None:
        """The living process of this name, started here or by the supervisor."""
        for one in reversed(self.processes):
            if one.is_over:
                continue
            if one.name == name:
                return psutil.Process(one.pid)
            for child in psutil.Process(one.pid).children() if one.name == SUPERVISOR else ():
                with suppress(psutil.NoSuchProcess):  # it ends just now
                    if name in child.cmdline():
                        return child
        return None

    def role(self, name: str) -> psutil.Process:
        """The living process of this name, as soon as there is one."""
        return self.wait_for(lambda: self.living(name))

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends the signal to a role's process; returns once the supervisor has started another."""
        victim = self.role(name)
        victim.send_signal(number)
        self.wait_for(lambda: (now := self.living(name)) is not None and now.pid != victim.pid)

    def step(self) -> int:
        return steps_done(self.folder)

    def wait_for_step(self, step: int, bound_s: float = WAIT_S) -> None:
        self.wait_for(lambda: self.step() >= step, bound_s)

    def wait_for(self, condition: Callable[[], Value | None], bound_s: float = WAIT_S) -> Value:
        """Returns what the condition gives once it holds."""

        def looked() -> Value | None:
            newest = {one.name: one for one in self.processes}
            ended = [one for one in newest.values() if one.name in self.vital and one.is_over]
            value = condition()
            if not value and ended:
                raise RunFailed("\n".join(one.describe() for one in ended))
            return value

        return wait_for(looked, describe=self.describe, bound_s=bound_s)

    def wait_complete(self, *meanwhile: Callable[[], object], bound_s: float = WAIT_S) -> None:
        """Waits until the supervisor, or a trainer without one, ends with the run complete, then
        stops every other process, the archive last. Each of `meanwhile` is called again and again.
        """

        def is_complete() -> bool:
            for look in meanwhile:
                look()
            newest = {one.name: one.process.poll() for one in self.processes}
            return 0 in (newest.get(SUPERVISOR), newest.get("trainer"))

        self.wait_for(is_complete, bound_s)
        for is_archive in (False, True):
            others = [
                one
                for one in self.processes
                if not one.is_over and (one.name == "archive") == is_archive
            ]
            for one in others:
                one.send_signal(signal.SIGTERM)
            for one in others:
                one.wait(None)

    def audit(self, *words: str, bound_s: float = WAIT_S) -> dict[str, Any]:
        """The report of `rollstream audit`, with violations or without."""
        line = ("audit", str(self.folder), "--json", *words)
        done = HERE.run(*line, code=None, bound_s=bound_s)
        if not done.stdout:
            raise RunFailed(f"{' '.join(line)} ended with {done.returncode}: {done.stderr}")
        return json.loads(done.stdout)

    def describe(self) -> str:
        """The ends of the outputs of all its processes."""
        return "\n".join(one.describe() for one in self.processes)

    def close(self) -> None:
        """`kill -9` of all that live."""
        for one in self.processes:
            one.kill()


def set_words(settings: Sequence[str]) -> list[str]:
    """The settings as words of a command line."""
    return [word for setting in settings for word in ("--set", setting)]


def steps_done(folder: Path) -> int:
    """The last step in the trainer's metrics file; opens neither log nor store."""
    lines = read_metrics(folder / "metrics" / "trainer.jsonl")
    return max((int(line["step"]) for line in lines), default=0)
