"""A game day: faults are planted into a living run in an order that the operator does not know, and
he mends them with the runbook.

    python -m testbed.oncall.game_day FOLDER --faults 5

The operator works in other shells, each begun with `. FOLDER/env.sh`, as on call: `rollstream …
$RUN` is the run, and `game-help` lists the words that stand for what is outside of Rollstream. A
journal of what was planted, which alerts fired and ended, and what was mended is written to
FOLDER/journal.jsonl, which he reads afterwards. The results are in docs/reference/game-day.md.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import boto3

from testbed.oncall.game_stack import BUCKET, LivingStack, living_stack
from testbed.oncall.living_faults import LIVING_FAULTS, Mended
from testbed.oncall.operator_shell import serve_words
from testbed.run_driver import steps_done
from testbed.servers.prometheus import Prometheus

LOOK_S = 5.0
HELP = """\
rollstream COMMAND $RUN   the product, with the store's credentials
alerts                    what fires now (scraped every 5 s, evaluated every 15 s)
run-start [OPTIONS]       `rollstream run $RUN OPTIONS` as a service; its output: $GAME/run.txt
run-stop                  ends it in order (Ctrl-C)
observer-restart          the service `rollstream observe $RUN`; it is started whenever it ends
servers                   which servers live: kafka, object-store, reward-service
server-start NAME         starts a dead one
provider-call             asks the provider of the object store, who ends troubles of his own
object-put FILE KEY       uploads a file to s3://game/run/KEY
kernel-log                the kernel's messages
$GAME/credentials.sh      the store's credentials, read at each start; yours to edit
$GAME/objects             the disk of the object store's server (`df`)
$GAME/backup              last night's backup of the run, if there is one
plant                     the next fault
reveal [give-up]          what it was, once it is mended, or before
finish                    the end of the game day
"""
SILENCED = ("RollstreamTrainerStarved", "RollstreamRolloutsStarved")
"""They fire all day: the reward takes longer than all else, so that the run leaves the machine to
others.
"""
LAST = ("key_rotated", "trainer_out_of_memory")
"""Their deaths keep `roles_dying` for ten minutes, in which it shows nothing of another fault."""


@dataclass
class GameDay:
    """Answers what the operator asks for, and keeps the journal. `left` are the next faults."""

    living: LivingStack
    prometheus: Prometheus
    left: list[str]
    planted: str = ""
    mended: Mended = field(default=lambda: True)
    mended_at_step: int | None = None
    fired: set[str] = field(default_factory=set[str])
    looked_s: float = 0.0

    def note(self, event: str, **more: object) -> None:
        line = {"time_s": round(time.time(), 1), "step": steps_done(self.living.run)}
        with (self.living.folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps({**line, "event": event, **more}) + "\n")

    def noted(self, word: str, answer: Callable[..., str]) -> Callable[..., str]:
        def answered(*given: str) -> str:
            self.note("asked", words=[word, *given])
            return answer(*given)

        return answered

    def between(self) -> None:
        if time.monotonic() - self.looked_s > LOOK_S:
            self.look()
            self.looked_s = time.monotonic()

    def look(self) -> None:
        """Note alerts that began or ended, and whether the fault's cause has gone."""
        firing = {name for name, _ in self.prometheus.firing()} - {*SILENCED}
        for name in sorted(firing ^ self.fired):
            self.note("fires" if name in firing else "ended", alert=name)
        self.fired = firing
        if self.planted and self.mended_at_step is None and self.mended():
            self.mended_at_step = steps_done(self.living.run)
            self.note("mended", fault=self.planted)
            self.living.job_failed = ""
        if not self.living.is_alive("observer"):
            self.living.start_observer()

    def plant(self) -> str:
        if self.planted:
            return "mend the last fault and `reveal` it first"
        if not self.left:
            return "no fault is left: `finish`"
        name, self.mended_at_step = self.left.pop(0), None
        self.note("plants", fault=name)
        self.mended = LIVING_FAULTS[name].plant(self.living)
        self.planted = name
        self.note("planted", fault=name)
        return f"planted, {len(self.left)} left"

    def reveal(self, how: str = "") -> str:
        if not self.planted:
            return "nothing is planted"
        self.look()
        steps = steps_done(self.living.run) - (self.mended_at_step or 0)
        if self.mended_at_step is None or not steps:
            if how != "give-up":
                gone = "still there" if self.mended_at_step is None else "gone, but no step since"
                return f"not yet: its cause is {gone}"
            steps = 0
        name, self.planted = self.planted, ""
        self.note("revealed", fault=name, steps_since=steps)
        return f"{name}: {LIVING_FAULTS[name].what}; {steps} steps since it was mended"

    def alerts(self) -> str:
        found = [self.living.job_failed] if self.living.job_failed else []
        if (code := self.living.processes["run"].process.poll()) is not None:
            found.append(f"service manager: `rollstream run $RUN` has ended, exit code {code}")
        for one in self.prometheus.firing_alerts():
            labels, notes = one["labels"], one["annotations"]
            if labels["alertname"] in SILENCED:
                continue
            head = f"{labels['severity']}: {labels['alertname']} since {one['activeAt']}"
            found.append(f"{head}\n  {notes['summary']}\n  {notes['runbook']}")
        return "\n".join(sorted(found)) or f"none fires (silenced: {', '.join(SILENCED)})"

    def run_start(self, *options: str) -> str:
        if self.living.is_alive("run"):
            return f"it runs already (process {self.living.processes['run'].pid})"
        self.living.start("run", "run", str(self.living.run), *options)
        return f"started as process {self.living.processes['run'].pid}"

    def stop(self, name: str) -> str:
        self.living.stop(name)
        return f"{name} has ended"

    def servers(self) -> str:
        broker, down = self.living.broker.is_running(), self.living.reward_service_down.exists()
        alive = {"kafka": broker, "object-store": True, "reward-service": not down}
        return "\n".join(f"{name}: {'up' if up else 'dead'}" for name, up in alive.items())

    def server_start(self, name: str) -> str:
        if name == "kafka" and not self.living.broker.is_running():
            self.living.broker.start()
            self.living.broker.wait_ready()
        if name == "reward-service":
            self.living.reward_service_down.unlink(missing_ok=True)
        return self.servers()

    def provider_call(self) -> str:
        if self.living.proxy.has_faults():
            self.living.proxy.clear()
            return "yes, an outage of ours; it is ended"
        return self.living.notice or "no trouble of ours is known"

    def object_put(self, file: str, key: str) -> str:
        objects = self.living.objects
        keys = {"aws_access_key_id": objects.access_key}
        keys["aws_secret_access_key"] = objects.secret_key
        client = boto3.Session().client(
            "s3", endpoint_url=objects.endpoint, region_name="us-east-1", **keys
        )
        client.put_object(Bucket=BUCKET, Key=f"run/{key}", Body=Path(file).read_bytes())
        return f"s3://{BUCKET}/run/{key} is written"

    def kernel_log(self) -> str:
        file = self.living.folder / "kernel.log"
        return file.read_text() if file.exists() else "no message"


def play(day: GameDay) -> None:
    """Do what the operator asks for, until he asks to finish."""
    asked: dict[str, Callable[..., str]] = {
        "plant": day.plant,
        "reveal": day.reveal,
        "alerts": day.alerts,
        "run-start": day.run_start,
        "run-stop": lambda: day.stop("run"),
        "observer-restart": lambda: day.stop("observer"),
        "servers": day.servers,
        "server-start": day.server_start,
        "provider-call": day.provider_call,
        "object-put": day.object_put,
        "kernel-log": day.kernel_log,
        "game-help": lambda: HELP,
    }
    serve_words(day.living.folder, {w: day.noted(w, one) for w, one in asked.items()}, day.between)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--faults", type=int, default=5, help="how many are ready to be planted")
    parser.add_argument("--only", default="", help="names of faults by comma, in their order")
    parser.add_argument("--without", default="", help="names that were planted before, by comma")
    given = parser.parse_args()
    folder: Path = given.folder.absolute()
    folder.mkdir(parents=True)
    left = [name for name in LIVING_FAULTS if name not in given.without.split(",")]
    faults = random.SystemRandom().sample(left, min(given.faults, len(left)))
    faults.sort(key=LAST.__contains__)
    with living_stack(folder) as (living, prometheus):
        play(GameDay(living, prometheus, given.only.split(",") if given.only else faults))


if __name__ == "__main__":
    main()
