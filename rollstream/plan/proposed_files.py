"""The configuration that `rollstream plan --toml` proposes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from rollstream.plan import rates
from rollstream.plan.engines import SAMPLES, PlanRequest
from rollstream.plan.planner import CardLayout, RunPlan
from rollstream.printable import shell_command, shell_words
from rollstream.run.sizes.devices import CARDS_PER_MACHINE
from rollstream.storage.settings import RelaySettings

PROMPT_SHARE, PROMPT_MAX = 4, 2048
"""The prompt gets a quarter of the context, at most 2048 tokens. A choice: the prompts of the
Laminar paper have at most 2 K tokens.
"""
ADAPTER_LR, FULL_LR = 1e-5, 1e-6
"""For an adapter (LoRA) and for all weights. A choice: with 1e-6 the size of a delta was measured
(`rates.DELTA_SHARE`), and an adapter needs up to ten times the rate of all weights ("LoRA Without
Regret", Thinking Machines, 2025; docs/how-to/train-with-lora.md).
"""
REFERENCE_KL = 0.04
"""β of DeepSeekMath (arXiv 2402.03300, section 4.2)."""
RELAY_PORT = 9470
"""Of a relay's server; as in docs/explanation/relay.md."""
RELAY_VERSIONS = 2.2
"""In a relay's cache. A choice: the newest, the next while it arrives (`storage/relay/cache.py`),
and deltas.
"""
TABLE_COMMENTS = {
    "relay": "bytes_max is in /dev/shm of each machine: two full versions, and deltas",
    "devices": "cards of each role on this machine",
    "trainer": "masters, optimiser and head stay float32",
    "sampling": "add your [task]: docs/tutorial/own-reward.md",
}
"""Table → the comment beside its head."""
COORDINATORS = "prompts dispatch archive"
"""With a single holder, without a card."""
TORCHRUN = (
    "torchrun --nnodes {machines} --nproc-per-node {cards} --rdzv-backend c10d "
    "--rdzv-endpoint HOST:29400 --max-restarts 100 -m -- rollstream train {run}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFile:
    """The kind is "run" where one machine has all roles, else "trainer" for the machines that train
    (perhaps with rollouts beside) or "rollouts" for those that only generate.
    """

    kind: Literal["run", "trainer", "rollouts"]
    machines: int
    ranks: int
    settings: dict[str, dict[str, Any]]
    card: str = ""
    """Where the plan has several kinds."""

    @property
    def generates(self) -> bool:
        return "rollouts" in self.settings["devices"]

    def name(self, file: str) -> str:
        """Returns the name from the user's name `file`: `plan.toml` itself, `plan-trainer.toml` or
        `plan-rollouts.toml`, with several kinds of cards `plan-rollouts-l40s.toml`.
        """
        path, words = PurePath(file), f"{self.kind} {self.card}".lower().split()
        return (
            file
            if self.kind == "run"
            else str(path.with_name(f"{path.stem}-{'-'.join(words)}.toml"))
        )

    def commands(self, file: str) -> list[str]:
        """Returns the commands that start the run on each of these machines; in brackets for the
        first alone.
        """
        if self.kind == "run":
            return [shell_command("run", file)]
        run = shell_words(file, "--run", "RUN")
        if self.kind == "rollouts":
            relay = f"{_command('relay', file)} --name relay-$(hostname) &"
            return [relay, *self._engine_commands(file)]
        if self.generates:
            return [_command("run", file)]
        train = _command("train", file)
        if self.machines > 1:
            train = TORCHRUN.format(machines=self.machines, cards=CARDS_PER_MACHINE, run=run)
        return [train, f"(for role in {COORDINATORS}; do rollstream $role {run} & done)"]

    def _engine_commands(self, file: str) -> list[str]:
        rollouts = self.settings["rollouts"]
        cards, count = rollouts.get("vllm", {}).get("tensor_parallel", 1), rollouts["count"]
        cards_text = (
            "$n" if cards == 1 else f"$(seq -s, $((n * {cards})) $((n * {cards} + {cards - 1})))"
        )
        rollout = f"{_command('rollout', file)} --name rollout-$(hostname)-$n"
        commands = [
            f"for n in $(seq 0 {count - 1}); do CUDA_VISIBLE_DEVICES={cards_text} {rollout} & done",
        ]
        # The evaluation shares the first rollout's cards.
        if self.settings["evaluation"]["enabled"]:
            first = ",".join(map(str, range(cards)))
            commands.append(f"(CUDA_VISIBLE_DEVICES={first} {_command('eval', file)} &)")
        return commands


def _command(role: str, file: str) -> str:
    return shell_command(role, file, "--run", "RUN")


def machine_files(plan: RunPlan) -> tuple[MachineFile, ...]:
    """One for one machine, else one for the machines that train and one for those that generate;
    they differ only in `devices`, `rollouts.count` and `evaluation.enabled`.
    """
    request, layout = plan.request, plan.layout
    assert layout is not None, "nothing is proposed for a plan that does not fit"
    ranks = layout.trainer_cards
    if layout.is_shared:
        return (_file(plan, "run", 1, {"trainer": [0], "rollouts": [0]}),)
    if request.machines == 1:
        devices = {"trainer": ranks, "rollouts": request.cards - ranks}
        return (_file(plan, "run", 1, devices),)
    first = min(ranks, CARDS_PER_MACHINE)
    devices = {"trainer": first}
    if first < CARDS_PER_MACHINE:
        # The trainer needs only some cards of its one machine.
        devices["rollouts"] = CARDS_PER_MACHINE - first
    training = -(-ranks // CARDS_PER_MACHINE)
    rest = request.cards - training * CARDS_PER_MACHINE
    trainer = _file(plan, "trainer", training, devices)
    rollout_devices = {"rollouts": min(rest, CARDS_PER_MACHINE)}
    rollouts = _file(plan, "rollouts", request.machines - training, rollout_devices)
    # A run has one evaluation, which shares its first rollout's cards.
    (rollouts if trainer.generates else trainer).settings["evaluation"]["enabled"] = False
    return trainer, rollouts


def _file(
    plan: RunPlan,
    kind: Literal["run", "trainer", "rollouts"],
    machines: int,
    devices: dict[str, Any],
) -> MachineFile:
    request, layout = plan.request, plan.layout
    assert layout is not None
    settings = run_settings(request, layout)
    settings["devices"] = devices
    if not layout.is_shared:
        cards = devices.get("rollouts", CARDS_PER_MACHINE)
        settings["rollouts"]["count"] = cards // layout.engine.tensor_parallel
    return MachineFile(kind=kind, machines=machines, ranks=layout.trainer_cards, settings=settings)


def run_settings(request: PlanRequest, layout: CardLayout) -> dict[str, dict[str, Any]]:
    """Returns the settings that all files share, with defaults for those that `_file` sets."""
    context, size = request.context, layout.engine
    engine: dict[str, Any] = {"engine": "torch", "device": "cuda", "dtype": "bfloat16"}
    if size.is_vllm:
        vllm: dict[str, Any] = {
            "memory_share": size.memory_share,
            "tensor_parallel": size.tensor_parallel,
        }
        if request.fp8:
            vllm["args"] = {"quantization": "fp8"}
            vllm["head_float32"] = False
        engine = {"engine": "vllm", "vllm": vllm}
    model: dict[str, Any] = {"path": request.shape.hub or request.shape.name}
    if request.lora_rank:
        model["lora"] = {"rank": request.lora_rank, "alpha": 2 * request.lora_rank}
    relay: dict[str, Any] = {"enabled": request.machines > 1}
    if request.machines > 1:
        version = rates.version_bytes(request.shape, request.lora_rank).full
        cache_bytes = max(RelaySettings().bytes_max, int(RELAY_VERSIONS * version))
        relay |= {"host": "0.0.0.0", "port": RELAY_PORT, "bytes_max": cache_bytes}
    return {
        "model": model,
        "sampling": {"tokens_max": context - min(PROMPT_MAX, context // PROMPT_SHARE)},
        "devices": {},
        "rollouts": {"count": 1, "slots": size.slots, "context_max": context, **engine},
        "trainer": {
            "device": "cuda",
            "processes": min(layout.trainer_cards, CARDS_PER_MACHINE),
            "workers": 1,
            "groups_per_step": request.groups,
            "samples_per_group": SAMPLES,
            "compute": layout.form.compute,
            "gradient_checkpointing": layout.form.recompute,
            "micro_batch_tokens": layout.form.micro_batch_tokens,
            "lr": ADAPTER_LR if request.lora_rank else FULL_LR,
            **({"reference_kl": REFERENCE_KL} if request.reference else {}),
            **({"preset": "ppo"} if request.critic else {}),
        },
        "weights": {"dtype": "bfloat16"},
        "relay": relay,
        "evaluation": {"enabled": size.has_evaluation, "slots": size.slots},
    }


def toml_files(plan: RunPlan, file: str) -> dict[str, str]:
    """Returns the texts of the proposed files by their names (`MachineFile.name`)."""
    files = machine_files(plan)
    return {
        machine_file.name(file): toml_text(plan, machine_file, machine_file.name(file))
        for machine_file in files
    }


def toml_text(plan: RunPlan, machine_file: MachineFile, file: str) -> str:
    """Returns the text of one file; `file` is its own name."""
    request, layout = plan.request, plan.layout
    assert layout is not None
    lines = [f"# {request.shape.name} on {request.cards} x {request.card.name}, by arithmetic"]
    if layout.engine.reason:
        lines.append(f"# engine torch: {layout.engine.reason}")
    if machine_file.kind != "run":
        lines += [f"# {line}" for line in _start_lines(request, machine_file, file)]
    for table, values in machine_file.settings.items():
        lines += _table_lines(table, values, _model_comment(request))
    return "\n".join(lines) + "\n"


def _start_lines(request: PlanRequest, machine_file: MachineFile, file: str) -> list[str]:
    work = "generate" if machine_file.kind == "rollouts" else "train"
    last = request.cards % CARDS_PER_MACHINE if machine_file.machines > 1 else 0
    partly = [f"The last one has {last} cards: fewer rollouts there."] if last else []
    return [
        f"For machines that {work}: {machine_file.machines} of {request.machines}. "
        "`rollstream run` starts",
        "the roles of one machine alone. Start here, and in brackets on the first one alone:",
        *(f"  {command}" for command in machine_file.commands(file)),
        *partly,
        "First set bus and store, alike in all files, to URLs that all machines reach",
        "(docs/how-to/deploy.md), and ROLLSTREAM_RELAY_TOKEN to one secret everywhere. RUN is a",
        "folder of each machine's own.",
        'bus = "kafka://HOST:9092/RUN"',
        'store = "s3://BUCKET/RUN"',
    ]


def _model_comment(request: PlanRequest) -> str:
    if request.shape.hub:
        return f"not here: first `hf download {request.shape.hub}`, or set a checkpoint's folder"
    return "a folder, or a Hub name in this machine's cache"


def _table_lines(table: str, values: Mapping[str, Any], model: str) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    comment = model if table == "model" else TABLE_COMMENTS.get(table)
    if table == "relay" and not values["enabled"]:
        comment = None
    lines: list[str] = []
    if plain:
        lines = ["", f"[{table}]" + (f"   # {comment}" if comment else "")]
        lines += [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _table_lines(f"{table}.{key}", value, model)  # pyright: ignore[reportUnknownArgumentType]
    return lines
