"""A rollout of episodes in a process of its own, to be killed:
`python -m testbed.agents.process FOLDER PORT TERM EPISODES [COMMAND…]` resumes the episodes from
the log in the folder, or starts them in term 1, until it is killed. Without a command for each
episode a service asks. `killed_episodes` does that several times
while programs ask, and counts what was lost.
"""

import json
import random
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from rollstream.import_path import module_environment
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.agents.keys import SessionIdentity, SessionKeys
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.branches import Indices, leaves
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Partial, Trajectory
from rollstream.streams.topics import catalogue
from testbed.agents.rollout import AgentRollout, assignment, letters_format, resumed
from testbed.servers import free_ports
from testbed.waiting import let_pass, wait_for

SECRET = b"0123456789abcdef"


def run(folder: Path, port: int, term: int, episodes: int, command: tuple[str, ...]) -> None:
    """Runs the rollout until the process is killed."""
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    settings = AgentSettings(service=not command, command=command, endpoint=f"127.0.0.1:{port}")
    rollout = AgentRollout(bus, settings=settings, term=term, secret=SECRET).start()
    ended = {record.trajectory for record in records(bus, "trajectories")}
    for number in range(episodes):
        order = assignment(f"{number}.0", rollout_term=term, attempt=1)
        if order.trajectory in ended:
            continue
        if any(record.trajectory == order.trajectory for record in records(bus, "partials")):
            order = resumed(bus, order)
        place: dict[str, Any] = {"kind": order.kind, "partial": order.partial, "first": order.first}
        rollout.assign(assignment(order.trajectory, rollout_term=term, attempt=term, **place))
    while not rollout.failures:
        let_pass(0.1)
    sys.exit(1)


def records(bus: Bus, topic: str) -> list[Any]:
    """Returns the records of a topic that are in the log."""
    reader = TopicReader(bus, topic, from_begin(bus, topic))
    return [received.record for received in reader.read_to(bus.end(topic))]


@dataclass
class KillCounts:
    """Counts over killed episodes: `lost` episodes or answers, turns `sampled_again` after their
    answer was in the log, answers that the record has otherwise than their program (`differing`).
    """

    kills: int = 0
    turns: int = 0
    retries: int = 0
    lost: int = 0
    sampled_again: int = 0
    differing: int = 0
    notes: list[str] = field(default_factory=list[str])

    @property
    def wrong(self) -> int:
        return self.lost + self.sampled_again + self.differing


class _Program(threading.Thread):
    """Asks for `turns` turns of one conversation and repeats each request until it is answered. One
    of an episode's two conversations ends it, after the `other`.
    """

    def __init__(
        self, url: str, name: str, turns: int, bus_url: str, other: "_Program | None" = None
    ) -> None:
        super().__init__(daemon=True)
        self._bus_url, self._other = bus_url, other
        key = SessionKeys(SECRET).issue(SessionIdentity(name, 1, "rollout-0", 1))
        self._headers = {"authorization": f"Bearer {key}"}
        self.url, self.name_, self.turns = url, name, turns
        self.answers: list[str] = []
        self.retries = 0
        self.is_done = False

    def run(self) -> None:
        said = f"I am {self.name_}{', aside' if self._other is None else ''}"
        messages: list[dict[str, str]] = [{"role": "user", "content": said}]
        with httpx2.Client(timeout=30, trust_env=False) as client:
            while len(self.answers) < self.turns:
                body = {"model": "m", "messages": messages}
                found = self._ask(client, "POST", "/v1/chat/completions", body)
                text = found["choices"][0]["message"]["content"]
                self.answers.append(text)
                messages += [{"role": "assistant", "content": text},
                             {"role": "user", "content": f"turn {len(self.answers)}"}]  # fmt: skip
            if self._other is not None:
                self._other.join()
                self._ask(client, "DELETE", f"/sessions/{self.name_}", {"reward": 1.0})
        self.is_done = True

    def _has_ended(self) -> bool:
        """Whether the log has the episode's record. Until the episode is assigned to it, a rollout
        that has just started answers 409 too.
        """
        bus = open_bus(self._bus_url)
        try:
            return self.name_ in {record.trajectory for record in records(bus, "trajectories")}
        finally:
            bus.close()

    def _ask(self, client: httpx2.Client, method: str, path: str, body: Any) -> Any:
        while True:
            try:
                found = client.request(method, self.url + path, json=body, headers=self._headers)
                if found.status_code in (200, 204):
                    return found.json() if found.content else None
                if found.status_code == 409 and method == "DELETE" and self._has_ended():
                    return None  # the answer to that was lost
            except httpx2.HTTPError:
                pass
            self.retries += 1
            let_pass(0.02)


def killed_episodes(
    folder: Path, kills: int, seed: int, episodes: int = 4, turns: int = 12
) -> KillCounts:
    """Kills the rollout `kills` times at random moments while programs run episodes, each of two
    conversations of `turns` turns that ask at the same time.
    """
    drawn, counts = random.Random(seed), KillCounts()
    bus_url = f"sqlite:{folder / 'bus'}"
    bus = open_bus(bus_url)
    bus.create(catalogue(1))
    (port,) = free_ports(1)
    programs: list[_Program] = []
    for number in range(episodes):
        place = f"http://127.0.0.1:{port}", f"{number}.0", turns, bus_url
        aside = _Program(*place)
        programs += [aside, _Program(*place, aside)]
    process = _start(folder, port, 1, episodes)
    for program in programs:
        program.start()
    for term in range(2, kills + 2):
        before = sum(len(program.answers) for program in programs)
        wanted = before + drawn.randrange(1, 1 + max(1, 2 * episodes * turns // (kills + 1)))
        wait_for(
            lambda wanted=wanted: (
                sum(len(program.answers) for program in programs) >= wanted
                or all(program.is_done for program in programs)
            ),
            process,
        )
        let_pass(drawn.random() * 0.01)
        process.kill()
        process.wait()
        counts.kills += 1
        process = _start(folder, port, term, episodes)
    wait_for(lambda: all(program.is_done for program in programs), process)
    wait_for(lambda: len({r.trajectory for r in records(bus, "trajectories")}) == episodes, process)
    process.kill()
    process.wait()
    _count(bus, programs, counts)
    bus.close()
    return counts


def _start(folder: Path, port: int, term: int, episodes: int) -> "subprocess.Popen[bytes]":
    import os

    command = [sys.executable, "-m", "testbed.agents.process"]
    return subprocess.Popen(
        [*command, str(folder), str(port), str(term), str(episodes)],
        env={**os.environ, **module_environment()},
    )


def _count(bus: Bus, programs: list[_Program], counts: KillCounts) -> None:
    digests = Counter(
        (record.trajectory, turn.digest)
        for record in records(bus, "partials")
        if isinstance(record, Partial)
        for turn in record.turns
    )
    counts.sampled_again = sum(count - 1 for count in digests.values())
    done = {r.trajectory: r for r in reversed(records(bus, "trajectories"))}
    for program in programs:
        record = done.get(program.name_)
        counts.turns += len(program.answers)
        counts.retries += program.retries
        if not isinstance(record, Trajectory) or refusal(record, TrainingBounds()) is not None:
            counts.lost += 1
            continue
        paths = leaves(len(record.tokens), record.branches)
        said = [_said(record, path) for path in paths]
        if len(paths) != 2 or program.answers not in said or record.abandoned:
            counts.differing += 1
            counts.notes.append(json.dumps([program.name_, len(paths), record.abandoned]))


def _said(record: Trajectory, path: Indices) -> list[str]:
    """Returns the answers on a path."""
    chat, ends = letters_format(), set(path.tolist())
    return [
        chat.decode(record.tokens[turn.generated : turn.end].tolist())
        for turn in record.turns
        if turn.end - 1 in ends
    ]


if __name__ == "__main__":
    folder_, port_, term_, episodes_, *command_ = sys.argv[1:]
    run(Path(folder_), int(port_), int(term_), int(episodes_), tuple(command_))
