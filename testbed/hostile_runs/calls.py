"""How each looking command is called on a received run, archive or backup (`CALLS`), and why the
other commands are not (`NOT_LOOKING`). `unstated` lists commands and actions that neither names, so
a new command is covered, or the test fails until it is.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module

from rollstream.run.cli.commands import COMMANDS
from testbed.hostile_runs.base_run import STEP
from testbed.hostile_runs.scene import Scene
from testbed.repository import ROOT

RUNS = frozenset({"run", "archive"})
BACKUPS = frozenset({"backup"})
ROUTES = (
    "/",
    "/api/runs",
    *(
        f"/api/r/0/{name}"
        for name in (
            "sheet", "learned", "settings", "steps", "steps/7", "groups", "groups/1",
            "trajectories/1.0",
            "lanes", "map/length", "search?q=1", "questions", "weights", "audit",
            "records/ledger/0/1", "sql?q=SELECT+count(*)+FROM+trajectories",
        )
    ),
)  # fmt: skip
"""The explorer's page and each kind of its answers."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a command. Words may hold {run}, {runs}, {own} and {out} (`Scene`).

    `writes` are the paths in the received folder that the command writes because the user asked for
    it, "" for all. With `serves` the command serves HTTP until it is stopped.
    """

    words: tuple[str, ...]
    kinds: frozenset[str] = RUNS
    writes: tuple[str, ...] = ()
    serves: bool = False
    is_heavy: bool = False
    """It loads torch: seconds in a process of its own."""

    @property
    def command(self) -> str:
        return self.words[0]

    @property
    def name(self) -> str:
        """Returns a short name: the command, the action and the options that tell calls apart."""
        return " ".join(w for w in self.words if not w.startswith("{") and "/" not in w)[:48]

    def line(self, scene: Scene) -> list[str]:
        """Returns the words after `rollstream` for this scene."""
        received = scene.received
        places = {
            "run": received, "runs": received.parent, "own": scene.own_run, "out": scene.out,
            "examples": ROOT / "examples",
        }  # fmt: skip
        return [word.format(**places) for word in self.words]


def _call(line: str, **more: object) -> Call:
    """Returns a call of this line; the text after ` | ` is one word."""
    words, _, last = line.partition(" | ")
    return Call((*words.split(), *([last] if last else [])), **more)  # pyright: ignore[reportArgumentType]


CALLS = (
    _call("ls {runs}"),
    _call("ls {runs} --json"),
    _call("top {run} --once"),
    _call("report {run}", writes=("report.html",)),
    _call("report {run} {own} --output {out}/both.html"),
    _call("query {run} | SELECT * FROM trajectories"),
    _call("query {run} | SELECT * FROM steps"),
    _call("query {run} --skip-corrupt | SELECT count(*) FROM groups"),
    _call("query {run} --tables"),
    _call("explore {run} --export {out}/page --nice 0"),
    _call("explore {run} --no-browser --sql --nice 0 --port 0", serves=True),
    _call("trace {run} --perfetto {out}/trace.json.gz"),
    _call("tail {run} trajectories --last 3"),
    _call("tail {run} ledger --from begin --json"),
    _call("tail {run}/store trajectories --last 1"),
    _call("tail {run}/config.json status --from begin"),
    _call("inspect {run} --last"),
    _call("inspect {run} --last --logprobs --skip-corrupt"),
    _call("config {run}"),
    _call("config {run} --changes"),
    _call("diff {run} {own}"),
    _call("diff {own} {run} --json"),
    _call("weights list {run}"),
    _call("weights show {run} latest"),
    _call("weights verify {run}", is_heavy=True),
    _call("weights diff {run} 6 7", is_heavy=True),
    _call("weights export {run} latest --out {out}/exported", is_heavy=True),
    _call("checkpoints list {run}"),
    _call("checkpoints show {run} latest"),
    _call("fork {run} --at latest --out {out}/fork", is_heavy=True),
    _call(
        f"replay {{run}} --from-step {STEP - 1} --to-step {STEP} --out {{out}}/again", is_heavy=True
    ),
    _call("replay {run} --to sqlite:{out}/copy --topic trajectories"),
    _call(
        "replay {run} --offline {own}/config.json --set trainer.steps=1 --out {out}/offline",
        is_heavy=True,
    ),
    _call("replay {run} --token-scores", writes=("token-scores.parquet",), is_heavy=True),
    _call("tune {examples}/quickstart.toml {run} --gpus 2"),
    _call("audit {run}"),
    _call("audit {run} --whole --json"),
    _call("backup {run} {out}/backup"),
    _call("restore {run} {out}/restored", kinds=BACKUPS),
    _call("rm {run} --yes", writes=("",)),
    _call("forward {run} --to tensorboard", writes=("metrics",)),
    _call("health --sandbox {run}/config.json"),
    _call("trust {run}"),
)
"""All calls of looking commands, in the order of the help."""

_STARTS = "it runs the configuration that the user gives it, as `python FILE` runs a file"
NOT_LOOKING = {
    **dict.fromkeys(("run", "warmup", "put-model", "profile"), _STARTS),
    "check": "it reads the configuration, data and code of the user's own run, as run does",
    "plan": "it reads a model of the user's",
    "simulate": "it reads a cluster that the user describes",
    **{name: _STARTS for name, command in COMMANDS.items() if command.module == "role"},
}
"""Commands that take no run to look at, with the reason."""


@cache
def unstated() -> tuple[str, ...]:
    """Returns the commands, and actions of commands, that have neither a call nor a reason."""
    called = {call.command for call in CALLS}
    actions = {call.words[:2] for call in CALLS}
    missing = [name for name in COMMANDS if name not in called and name not in NOT_LOOKING]
    for name in sorted(called):
        module = import_module(f"rollstream.run.cli.{COMMANDS[name].module}")
        for action in getattr(module, "ACTIONS", {}):
            if action and (name, action) not in actions:
                missing.append(f"{name} {action}")
    return tuple(missing)
