"""Kills the processes of a whole run of agents at random moments: the rollout, the role `endpoint`,
the agent's process and the sandbox that it runs. The run goes on to its last step; `killed_run`
then counts what was lost, trained twice, or sampled again after it was answered.

A failed try of an episode is a fact of the log, with a reason, and is no loss while a later try
ends: `task.retries` is larger than the number of kills.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rollstream.errors import PositionLost
from rollstream.import_path import module_environment
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.registry import load_task
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import open_run_log_for_writing
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Partial, Trajectory
from testbed.agents import service as agent_service
from testbed.kills.final_counts import counted
from testbed.run_driver import RunDriver, steps_done
from testbed.run_process import random_model, read, tiny
from testbed.servers import free_ports
from testbed.waiting import let_pass

ROLLOUT, ENDPOINT, AGENT, SANDBOX = "rollout", "endpoint", "agent", "sandbox"
APART_S = 13.0  # between two kills of a role: a supervisor gives up after five in a minute
FOLLOW_S = 0.02
TURNS_MAX = 12  # most answers between two kills
MORE_STEPS = 2  # after the last kill


@dataclass
class RunCounts:
    """Counts over one run: `lost` trajectories, those trained `twice`, answers `sampled_again`, and
    answers that the trained record has otherwise (`differing`).
    """

    kills: Counter[str] = field(default_factory=Counter[str])
    answers: int = 0
    retried: int = 0
    abandoned: int = 0
    """Turns that restarted programs left behind."""
    lost: int = 0
    twice: int = 0
    sampled_again: int = 0
    differing: int = 0
    notes: list[str] = field(default_factory=list[str])

    @property
    def wrong(self) -> int:
        return self.lost + self.twice + self.sampled_again + self.differing


class _Killer:
    """Holds the run's processes, and the agent's where that is a service outside."""

    def __init__(self, folder: Path, run: RunDriver, url: str) -> None:
        self._folder, self._run, self._url = folder, run, url
        self._killed_s: dict[str, float] = {}
        self.service: subprocess.Popen[bytes] | None = None
        self.start_service()

    def start_service(self) -> None:
        """Starts the outside service, if the run has one."""
        if self._url:
            command = [sys.executable, "-m", "testbed.agents.service", self._url]
            with (self._folder / "service.txt").open("ab") as out:
                environment = {**os.environ, **module_environment(), **_notes(self._folder)}
                self.service = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def kill(self, kind: str) -> None:
        """Kills a process of this kind as soon as there is one."""
        rest = APART_S - (time.monotonic() - self._killed_s.get(kind, -APART_S))
        if kind in (ROLLOUT, ENDPOINT) and rest > 0:
            let_pass(rest)
        self._run.wait_for(lambda: self._has_killed(kind))
        self._killed_s[kind] = time.monotonic()
        if kind == AGENT and self.service is not None:
            self.service.wait()
            self.start_service()

    def _has_killed(self, kind: str) -> bool:
        try:
            for process in self._processes(kind):
                process.kill()
                return True
        except psutil.NoSuchProcess:
            pass
        return False

    def _processes(self, kind: str) -> list[psutil.Process]:
        if kind in (ROLLOUT, ENDPOINT):
            living = self._run.living(kind)
            return [] if living is None else [living]
        agents = [psutil.Process(self.service.pid)] if self.service is not None else []
        if not self._url:
            agents = [
                child
                for child in self._run.role(ROLLOUT).children()
                if "rollstream.producers.agents.program_process" in child.cmdline()
            ]
        if kind == AGENT:
            return agents
        below = [child for agent in agents for child in agent.children(recursive=True)]
        return [child for child in below if child.name() == "bwrap"]

    def close(self) -> None:
        if self.service is not None:
            self.service.kill()
            self.service.wait()


def _notes(folder: Path) -> dict[str, str]:
    return {agent_service.NOTES: str(folder / "answers.jsonl")}


def _answers(folder: Path) -> list[list[Any]]:
    """Returns what the programs noted; a line that a kill cut is left out."""
    path = folder / "answers.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("]")]


class _Partials(threading.Thread):
    """Follows the turns in `partials`, before they are truncated."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._bus = open_run_log_for_writing(load(folder / "config.json"), folder)
        self._reader = self._from_begin()
        self._ended = threading.Event()
        self.gaps = 0
        """How often records were truncated unread."""
        self.turns: Counter[tuple[str, int, str]] = Counter()
        """By trajectory, try, and digest."""

    def _from_begin(self) -> TopicReader:
        return TopicReader(self._bus, "partials", from_begin(self._bus, "partials"))

    def run(self) -> None:
        while not self._ended.wait(FOLLOW_S):
            self._follow()
        self._follow()
        self._bus.close()

    def end(self) -> None:
        """Returns once all that is in the log was read."""
        self._ended.set()
        self.join()

    def _follow(self) -> None:
        try:
            found = self._reader.read_to(self._bus.end("partials"))
        except PositionLost:
            self.gaps, self._reader = self.gaps + 1, self._from_begin()
            return
        for received in found:
            record = received.record
            if isinstance(record, Partial):
                place = record.trajectory, len(record.failures)
                self.turns.update((*place, turn.digest) for turn in record.turns)


def killed_run(
    base: Path, kills: int, seed: int, service: bool, wanders: bool = False
) -> RunCounts:
    """Runs until `kills` processes were killed and some steps more; `service`: the agent is an
    outside service behind the role `endpoint`, else a function beside the rollout, which with
    `wanders` takes another way each time it is started.
    """
    drawn, counts, folder = random.Random(seed), RunCounts(), base / "run"
    kinds = [ROLLOUT, AGENT, SANDBOX] + [ENDPOINT] * service
    order = [kinds[number % len(kinds)] for number in range(kills)]
    drawn.shuffle(order)
    front = f"127.0.0.1:{free_ports(1)[0]}"
    settings = [
        "trainer.steps=1000",
        f"task.retries={kills + 5}", "agent.episode_s=15",
        f"agent.setup_s={15 if service else 120}",  # the function's process must start first
        "rollouts.status_s=0.2", "dispatch.keep_s=5", f"task.environment=['{agent_service.NOTES}']",
        "trainer.filter_equal_rewards=false", "trainer.lr=1e-4", "sampling.tokens_max=120",
        *([f"agent.front={front}", "agent.service=true"] if service
          else [f"agent.episode=testbed.agents.service:{'wandering' if wanders else 'episode'}"]),
    ]  # fmt: skip
    with tiny(folder, random_model(base / "model"), settings) as run:
        run.environment = {**module_environment(), **_notes(base)}
        run.start()
        killer = _Killer(base, run, f"http://{front}" if service else "")
        try:
            run.wait_for_step(1)
            partials = _Partials(folder)
            partials.start()
            for kind in order:
                wanted = len(_answers(base)) + drawn.randrange(1, TURNS_MAX)
                run.wait_for(lambda wanted=wanted: len(_answers(base)) >= wanted)
                let_pass(drawn.random() * 0.1)
                killer.kill(kind)
                counts.kills[kind] += 1
            run.wait_for_step(run.step() + MORE_STEPS)
            run.newest().stop()
        finally:
            killer.close()
    partials.end()
    _count(base, partials, counts)
    return counts


def _count(base: Path, partials: _Partials, counts: RunCounts) -> None:
    tokenizer = load_task(TaskSettings()).tokenizer()
    steps = max(1, steps_done(base / "run"))
    found = counted(base / "run", steps)
    counts.twice += found.twice
    counts.lost += found.lost
    counts.notes += found.wrong
    counts.notes += [f"{partials.gaps} times partials were truncated unread"] * (partials.gaps > 0)
    counts.sampled_again = sum(count - 1 for count in partials.turns.values())
    texts: dict[tuple[str, int], dict[str, str]] = {}
    for name, retry, answer, text in _answers(base):
        counts.answers += 1
        held = texts.setdefault((name, retry), {})
        counts.sampled_again += held.setdefault(answer, text) != text
    done: dict[str, Trajectory] = {}
    for record in read(base / "run", "trajectories", Trajectory):
        done.setdefault(record.trajectory, record)
    for record in done.values():
        counts.retried += len(record.failures)
        counts.abandoned += len(record.abandoned)
        if record.finish == "dead":
            counts.lost += 1
            counts.notes.append(f"{record.trajectory} is dead: {record.reason}")
            continue
        known = {
            turn.digest: tokenizer.decode(record.tokens[turn.generated : turn.end].tolist())
            for turn in record.turns
        }
        for answer, text in texts.get((record.trajectory, len(record.failures)), {}).items():
            digest = answer.rpartition("-")[2]
            if known.get(digest) != text:
                counts.differing += 1
                counts.notes.append(f"{record.trajectory}: {digest} {known.get(digest)!r} {text!r}")
