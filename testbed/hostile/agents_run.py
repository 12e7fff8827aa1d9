"""A living run of agents that meets odd requests and odd partials (`LivingRun`): real processes,
over HTTP through the role `endpoint` and the rollout.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from rollstream.run.config.config import load
from rollstream.run.config.run_folder import open_run_log_for_writing
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.records import Assignment
from rollstream.streams.writer import publish_all
from testbed.agents.process import records
from testbed.hostile import agents as odd
from testbed.kills.final_counts import counted
from testbed.run_driver import RunDriver
from testbed.run_process import random_model, tiny
from testbed.servers import free_ports

SEED = 40
PROGRAMS = 6
REQUESTS_PER_EPISODE = 12


@dataclass
class LivingCounts:
    """Counts of one run: `roles` that ended and were not killed, answers by status, groups by their
    end, and what was not accounted for once.
    """

    roles: int = 0
    ends: Counter[str] = field(default_factory=Counter[str])
    unaccounted: list[str] = field(default_factory=list[str])


class LivingRun:
    """A run whose episodes are run by an outside service: this process, with `PROGRAMS` threads.
    They send `requests` requests, meanwhile `partials` partials are appended, and `kills` rollouts
    killed.
    """

    def __init__(self, base: Path, requests: int, partials: int, kills: int) -> None:
        self._base, self._folder = base, base / "run"
        self._requests, self._partials, self._kills_max = requests, partials, kills
        self._outcome = LivingCounts()
        self._url = f"127.0.0.1:{free_ports(1)[0]}"
        self._lock, self._asked = threading.Lock(), 0
        self._ended = threading.Event()
        self._kills = 0

    def run(self) -> LivingCounts:
        """Returns the counts, once the run has ended."""
        settings = [
            "trainer.steps=100000",
            "task.retries=1", "agent.episode_s=15", "agent.setup_s=15", "rollouts.status_s=0.2",
            "dispatch.keep_s=5", "trainer.filter_equal_rewards=false", "trainer.lr=1e-5",
            f"agent.front={self._url}", "agent.service=true", "truncate=false",
            "agent.turns_max=64",
        ]  # fmt: skip
        with tiny(self._folder, random_model(self._base / "model"), settings) as run:
            run.start()
            threads = [threading.Thread(target=self._program) for _ in range(PROGRAMS)]
            for thread in threads:
                thread.start()
            try:
                run.wait_for(lambda: self._asked)
                self._append(run)
                # Further episodes are all good, so that a step is trained, whatever died before.
                run.wait_for_step(1)
            finally:
                self._ended.set()
                for thread in threads:
                    thread.join()
            last = run.step()
            run.newest().stop()
        self._count(max(last, run.step()))
        return self._outcome

    def _program(self) -> None:
        with httpx2.Client(timeout=150, trust_env=False) as client:
            while not self._ended.is_set():
                try:
                    opened = client.post(f"http://{self._url}/sessions", content=b"{}")
                    if opened.status_code == 200:
                        self._episode(client, opened.json())
                        continue
                except httpx2.HTTPError:  # the run starts
                    pass
                self._ended.wait(0.05)

    def _episode(self, client: httpx2.Client, session: Any) -> None:
        """Ask odd requests, then one that is served, and end the episode, oddly in a few cases."""
        with self._lock:
            first = self._asked
            is_good = first >= self._requests
            self._asked += 0 if is_good else REQUESTS_PER_EPISODE
        base, key = f"http://{self._url}", {"authorization": f"Bearer {session['key']}"}
        place = f"{base}/sessions/{session['id']}"
        for number in range(first, first + (0 if is_good else REQUESTS_PER_EPISODE - 2)):
            if number % 4:
                route, data = odd.hostile_body(SEED, number)
                self._send(client, "POST", base + route, data, key)
            else:
                self._send(client, "POST", f"{place}/reward", odd.hostile_end(SEED, number), key)
        good = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}'
        self._send(client, "POST", base + odd.ROUTES[0], good, key)
        is_odd = not is_good and first // REQUESTS_PER_EPISODE % 4 == 0
        data = odd.hostile_end(SEED, first) if is_odd else b'{"reward": 0.5}'
        if self._send(client, "DELETE", place, data, key) == 400:
            self._send(client, "DELETE", place, b'{"failed": "its end was refused"}', key)

    def _send(
        self, client: httpx2.Client, method: str, url: str, data: bytes, key: dict[str, str]
    ) -> int:
        what = f"{method} {url.partition('/')[2][-40:]}"
        try:
            answer = client.request(method, url, content=data, headers=key)
        except httpx2.HTTPError as error:
            self._outcome.unaccounted.append(f"{what}: {type(error).__name__}: {error}")
            return 0
        status = answer.status_code
        if status not in (200, 204) and not (400 <= status < 500 and answer.json()["error"]):
            self._outcome.unaccounted.append(f"{what}: status {status}: {answer.text[:100]}")
        with self._lock:
            self._outcome.ends[f"answers of {status}"] += 1
        return status

    def _append(self, run: RunDriver) -> None:
        """Append partials in the names of episodes that rollouts run now, and kill the rollout at
        two moments. Returns when the programs have asked all their requests.
        """
        bus = open_run_log_for_writing(load(self._folder / "config.json"), self._folder)
        appended = 0
        while self._asked < self._requests and not run.newest().is_over:
            due = self._partials * self._asked // self._requests
            orders = [one for one in records(bus, "assignments") if isinstance(one, Assignment)]
            newest = {one.trajectory: one for one in orders}
            names = list(newest.values())[-32:]
            batch = [
                odd.hostile_partial(SEED,
                    order.trajectory, number, attempt=order.attempt, rollout=order.rollout,
                    rollout_term=order.rollout_term,
                )
                for number in range(appended, due)
                for order in [names[number % len(names)]]
            ]  # fmt: skip
            if batch:
                publish_all(bus, "partials", [(one.trajectory, one) for one in batch])
                appended = due
            share = self._requests // (self._kills_max + 1)
            if self._kills < self._kills_max and self._asked >= (self._kills + 1) * share:
                run.role("rollout").kill()
                self._kills += 1
            self._ended.wait(0.2)
        rest = range(appended, self._partials)
        more = [odd.hostile_partial(SEED, "999999999.0", number) for number in rest]
        publish_all(bus, "partials", [(one.trajectory, one) for one in more])
        bus.close()

    def _count(self, steps: int) -> None:
        started = [
            line
            for line in read_metrics(self._folder / "metrics" / "supervisor.jsonl")
            if line.get("event") == "start" and line.get("restart")
        ]
        self._outcome.roles += abs(len(started) - self._kills)
        found = counted(self._folder, steps)
        self._outcome.ends["groups trained"] += found.trained
        self._outcome.ends["groups that died"] += found.dead
        wrong = found.lost + found.twice
        self._outcome.unaccounted += found.wrong[:wrong] or ["a count"] * wrong
