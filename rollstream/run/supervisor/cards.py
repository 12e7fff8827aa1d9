"""Assigns this machine's GPUs (cards) to the processes of `rollstream run` by `[devices]`
(docs/how-to/several-gpus.md); each sees only its own, numbered from 0. Also: the ranks of a Slurm
job.
"""

import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from rollstream.errors import ConfigurationError
from rollstream.producers.settings import RolloutSettings
from rollstream.run.config.settings import Configuration

# The cards that a process sees, in its numbering.
VISIBLE = "CUDA_VISIBLE_DEVICES"
# nvidia-smi counts in this order.
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
QUERY_S = 20.0
MIB = 1 << 20
# The largest share of a card's memory that engines may take together beside the trainer.
BESIDE_TRAINER = 0.85


@dataclass(frozen=True, slots=True)
class GpuCard:
    """Number in nvidia-smi's order, and memory in bytes (infinite if unknown)."""

    index: str
    name: str
    memory: float


def read_cards(environment: Mapping[str, str]) -> tuple[GpuCard, ...]:
    """Returns the cards that a process with this environment sees; none if `nvidia-smi` is missing,
    fails, or takes longer than `QUERY_S`.
    """
    try:
        completed = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=QUERY_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible_cards(completed.stdout, environment.get(VISIBLE))


def visible_cards(listing: str, visible: str | None) -> tuple[GpuCard, ...]:
    """Returns those that `visible` (`CUDA_VISIBLE_DEVICES`: numbers or UUIDs, None for all) names,
    in its order, from `QUERY`'s output `listing`. As in CUDA, the first unknown name ends the list.
    """
    by_name: dict[str, GpuCard] = {}
    for line in listing.splitlines():
        index, *words = (part.strip() for part in line.split(","))
        if not index.isdecimal() or len(words) < 3:
            # A warning of the driver.
            continue
        uuid, *names, memory = words
        card = GpuCard(index, ", ".join(names), _memory_bytes(memory))
        by_name[index] = by_name[uuid] = card
    if visible is None:
        return tuple({card.index: card for card in by_name.values()}.values())
    chosen: list[GpuCard] = []
    for word in filter(None, (part.strip() for part in visible.split(","))):
        # A slice of a card, which `QUERY` does not list, is a card of its own.
        if word.startswith("MIG-"):
            chosen.append(GpuCard(word, "slice of a GPU (MIG)", inf))
            continue
        names = [name for name in by_name if name == word or _is_short_uuid(word, name)]
        if len(names) != 1:
            break
        chosen.append(by_name[names[0]])
    return tuple(chosen)


def _memory_bytes(text: str) -> float:
    # A card that shares the machine's memory states `[N/A]`.
    return int(text) * MIB if text.isdecimal() else inf


def _is_short_uuid(word: str, name: str) -> bool:
    return word.startswith("GPU-") and name.startswith(word)


def assign_cards(c: Configuration, cards: Sequence[GpuCard]) -> Mapping[str, tuple[GpuCard, ...]]:
    """Assigns the cards by process; empty without `[devices]`. Raises `ConfigurationError` for
    cards that do not exist or cannot be cut so, for settings that do not fit, and for a shared card
    without enough memory.

    A setting is a number of cards, the trainer's before the rollouts', or a list of positions among
    `cards`. The rollouts' are cut into groups of one engine each, used in turn. The evaluation
    shares the first group, or the trainer's first cards; scorers that hold the reference share the
    trainer's first.
    """
    d = c.devices
    if d.trainer is None and d.rollouts is None:
        return {}
    trainer = _positions("devices.trainer", d.trainer, 0, cards)
    after = len(trainer) if isinstance(d.trainer, int) else 0
    rollouts = _positions("devices.rollouts", d.rollouts, after, cards)
    assigned: dict[str, tuple[int, ...]] = {}
    if trainer:
        assigned["trainer"] = tuple(trainer)
        _check_trainer(c, len(trainer))
        if c.scoring.holds_reference:
            assigned |= {f"scorer-{n}": tuple(trainer[:1]) for n in range(c.scoring.count)}
    groups = _groups(c.rollouts, rollouts)
    if groups:
        for number in range(c.rollouts.count):
            assigned[f"rollout-{number}"] = groups[number % len(groups)]
    if c.evaluation.enabled:
        engine_cards = c.rollouts.kind.cards(c.rollouts)
        shared = (
            groups[0] if groups and d.evaluation == "rollouts" else tuple(trainer[:engine_cards])
        )
        if len(shared) == engine_cards:
            assigned["eval"] = shared
    _check_overlaps(c, assigned)
    return {name: tuple(cards[at] for at in positions) for name, positions in assigned.items()}


def _positions(
    key: str, setting: int | tuple[int, ...] | None, after: int, cards: Sequence[GpuCard]
) -> list[int]:
    if setting is None:
        return []
    positions = list(range(after, after + setting)) if isinstance(setting, int) else list(setting)
    if len(set(positions)) != len(positions):
        raise ConfigurationError(f"{key} names a GPU twice: {positions}")
    if missing := [at for at in positions if not 0 <= at < len(cards)]:
        raise ConfigurationError(
            f"{key} needs GPU {missing[0]}, and {len(cards)} are visible here ({VISIBLE}, "
            f"`nvidia-smi`); ask for fewer, or name those that exist"
        )
    return positions


def _check_trainer(c: Configuration, count: int) -> None:
    t = c.trainer
    if t.device not in ("cuda", "auto"):
        raise ConfigurationError(
            f"trainer.device must be 'cuda' with devices.trainer, got {t.device!r}: the trainer's "
            "GPUs are numbered from 0 in its own processes"
        )
    if count != t.processes:
        raise ConfigurationError(
            f"devices.trainer has {count} GPUs, and trainer.processes is {t.processes}: each "
            "process takes one; set both to the same number"
        )


def _groups(rollouts: RolloutSettings, positions: Sequence[int]) -> list[tuple[int, ...]]:
    engine_cards = rollouts.kind.cards(rollouts)
    if not positions:
        return []
    if rollouts.kind.is_on_cpu(rollouts):
        raise ConfigurationError(
            "rollouts.device must be 'cuda' or 'auto' with devices.rollouts and the engine "
            f"{rollouts.engine!r}"
        )
    if len(positions) % engine_cards:
        raise ConfigurationError(
            f"devices.rollouts has {len(positions)} GPUs, and one engine takes {engine_cards} "
            "(rollouts.vllm.tensor_parallel and parallel sizes in rollouts.vllm.args): give a "
            "multiple"
        )
    return [
        tuple(positions[at : at + engine_cards]) for at in range(0, len(positions), engine_cards)
    ]


def _check_overlaps(c: Configuration, assigned: Mapping[str, Sequence[int]]) -> None:
    """Raises `ConfigurationError` for a shared card if its engines' memory shares together are
    above `BESIDE_TRAINER` beside a trainer, above 1 otherwise.
    """
    users: defaultdict[int, list[str]] = defaultdict(list)
    for name, positions in assigned.items():
        for at in positions:
            users[at].append(name)
    memory_share = c.rollouts.kind.memory_share(c.rollouts)
    for at, names in sorted(users.items()):
        share = memory_share * sum(not name.startswith(("trainer", "scorer")) for name in names)
        limit = BESIDE_TRAINER if "trainer" in names else 1.0
        if len(names) > 1 and share > limit:
            raise ConfigurationError(
                f"GPU {at} is given to {', '.join(names)}, whose engines take {share:g} of it "
                f"(rollouts.vllm.memory_share = {memory_share:g} each): at most {limit:g} leaves "
                "room; lower the share, or give them other GPUs (devices)"
            )


def visibility(assigned: Mapping[str, Sequence[GpuCard]], name: str) -> dict[str, str]:
    """Returns variables with which the process `name` sees only its own cards; none if no process
    has assigned cards.
    """
    if not assigned:
        return {}
    return {VISIBLE: ",".join(card.index for card in assigned.get(name, ())), **ORDER}


# Of a Slurm job: one of this many ports.
_FIRST_PORT, _PORTS = 29_500, 10_000


def ranks_of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what `torchrun` sets for a rank, made from Slurm's variables, so that `srun` can
    start a trainer's ranks; none outside of a step with several tasks, and if `RANK` or
    `WORLD_SIZE` is set already.
    """
    tasks, task = environment.get("SLURM_STEP_NUM_TASKS"), environment.get("SLURM_PROCID")
    if tasks is None or task is None or int(tasks) < 2 or {"RANK", "WORLD_SIZE"} & {*environment}:
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    sees_one = len(environment.get(VISIBLE, ",").split(",")) == 1  # --gpus-per-task=1
    # All tasks compute the same address.
    port = _FIRST_PORT + int(environment.get("SLURM_JOB_ID", "0")) % _PORTS
    return {
        "RANK": task,
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": "0" if sees_one else environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(hosts),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def first_host(hosts: str) -> str:
    """Returns the first host of Slurm's compact list: `gpu03` for `gpu[03-05,9],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", hosts)
    return "127.0.0.1" if match is None else match[1] + (match[2] or "")
