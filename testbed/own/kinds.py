"""Runs of every kind, as `rollstream run` makes them in a few steps, and the commands that write
into a run afterwards. Each kind has what another one lacks: an archive, agents, adapters, a relay,
late rewards, a critic, drafts, several ranks, a warm-up of its own, no model at all.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.repository import EXAMPLES, ROOT
from testbed.run_driver import Machine, RunDriver
from testbed.run_process import random_model

RUN_S = 240.0  # a run takes ten to thirty seconds on an idle machine with two cores
SMALL = (
    "trainer.steps=4", "trainer.groups_per_step=2", "trainer.samples_per_group=2",
    "trainer.workers=1", "checkpoints.every=2", "rollouts.count=1", "rollouts.slots=8",
    "rollouts.context_max=128", "sampling.tokens_max=16", "archive.roll_s=1", "dispatch.max_lag=2",
    "evaluation.enabled=false", "metrics.port=0", "dispatch.keep_s=0.5",
)  # fmt: skip
KINDS: Mapping[str, Sequence[str]] = {
    "evaluated": (
        "evaluation.enabled=true", "evaluation.every=2", "evaluation.prompts=4",
        "evaluation.samples=1",
    ),
    "adapters": ("model.lora.rank=2",),
    "relay": ("relay.enabled=true", "weights.shard_bytes=4096"),
    "critic": ("trainer.advantage=gae", "archive.enabled=false"),
    "scored": ("scoring.count=1", "task.reward=late", "rollouts.drafts=history"),
    "kept_version": (
        "rollouts.partial_tokens=4", "rollouts.on_update=keep_version", "weights.versions_max=3",
    ),
    "paced": (
        "rollouts.engine=paced", "trainer.learner=paced", "paced.weights_bytes=100000",
        "task.name=numbered", "paced.train_step_s=0.01", "paced.time_scale=0.01",
        "rollouts.drafts=off", "paced.kv_tokens=20000",
    ),
    "ranks": ("trainer.processes=2",),
    "warmed_up": ("warmup.documents=50", "warmup.steps=2"),
    "agents": (),
}  # fmt: skip
"""The settings of each kind, beside `SMALL`."""
WITHOUT_MODEL = ("paced", "warmed_up", "agents")
"""Kinds whose model is not given: they make it, or have none."""


REPOSITORY = Machine(folder=ROOT)


def run_of_kind(kind: str, folder: Path) -> RunDriver:
    """Returns a run of this kind in `folder`, without processes, and writes what it reads beside
    it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    configuration = folder.parent / f"{kind}.toml"
    settings = [*SMALL, *KINDS[kind]]
    if kind == "agents":
        configuration = EXAMPLES / "sorting-agent.toml"
        settings += ["warmup.documents=50", "warmup.steps=2", "rollouts.context_max=64"]
    else:
        configuration.write_text(f'run = "{kind.replace("_", "-")}"\n')
    if kind not in WITHOUT_MODEL:
        model = folder.parent / "model"
        settings += [f"model.path={model if model.exists() else random_model(model)}"]
        settings += ["warmup.enabled=false"]
    return RunDriver(folder, configuration, settings, REPOSITORY)


def make_run(kind: str, folder: Path) -> Path:
    """Run a run of this kind to its end in `folder`, which must be new; returns the folder."""
    with run_of_kind(kind, folder) as run:
        run.start().wait(bound_s=RUN_S)
    return folder


def make_derived(run: Path, folder: Path) -> dict[str, Path]:
    """Make all that a finished run can become, in `folder`: replays, a fork; and let the commands
    that write into a run's folder write into `run` itself. Returns the new folders by kind.
    """
    made = {name: folder / name for name in ("replay", "fork")}
    REPOSITORY.run("replay", str(run), "--from-step", "2", "--out", str(made["replay"]))
    REPOSITORY.run("replay", str(run), "--token-scores")
    REPOSITORY.run("fork", str(run), "--at", "latest", "--out", str(made["fork"]), "--set",
            "trainer.steps=6")  # fmt: skip
    REPOSITORY.run("report", str(run))
    REPOSITORY.run("audit", str(run))
    REPOSITORY.run("forward", str(run), "--to", "tensorboard")
    return made
