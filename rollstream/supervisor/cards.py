"""Finds the GPUs (cards) of this machine and assigns them to the processes of `rollstream run`, by
the settings `[devices]` (docs/how-to/several-gpus.md). Also: the ranks of a Slurm job.

The assignment is a pure function of the settings and the visible cards. Every process sees only its
own cards (`CUDA_VISIBLE_DEVICES`), numbered from 0, and a process without cards sees none. Without
`[devices]` nothing is assigned, and every process inherits the environment. Where `srun` starts a
trainer's ranks, `ranks_of_slurm` makes the variables that `torchrun` would set.
"""

import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError
from rollstream.producers.settings import RolloutSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the cards that a process sees, in its numbering
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # nvidia-smi counts in this order
QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
QUERY_S = 20.0
MIB = 1 << 20
BESIDE_TRAINER = 0.85
"""The largest share of a card's memory that engines may take together if the trainer uses the card
too.
"""


@dataclass(frozen=True, slots=True)
class GpuCard:
    """Describes a visible card: its number in nvidia-smi's order, as text, the name of its model,
    and its memory in bytes (infinite if nvidia-smi does not state it).
    """

    index: str
    name: str
    memory: float


def read_cards(environment: Mapping[str, str]) -> tuple[GpuCard, ...]:
    """Returns the cards that a process with this environment sees; none if `nvidia-smi` is missing,
    fails, or takes longer than `QUERY_S`.
    """
    try:
        found = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible_cards(found.stdout, environment.get(VISIBLE))


def visible_cards(listing: str, visible: str | None) -> tuple[GpuCard, ...]:
    """Returns the cards that `visible` names, in its order. `listing` is the output of `QUERY`;
    `visible` is the value of `CUDA_VISIBLE_DEVICES`, numbers or UUIDs, or None for all cards. As in
    CUDA, the first unknown name ends the list. A slice of a card (MIG), which `QUERY` does not
    list, is a card of its own.
    """
    by_name: dict[str, GpuCard] = {}
    for line in listing.splitlines():
        index, *words = (part.strip() for part in line.split(","))
        if not index.isdecimal() or len(words) < 3:
            continue  # a warning of the driver
        uuid, *names, memory = words
        card = GpuCard(index, ", ".join(names), _memory_bytes(memory))
        by_name[index] = by_name[uuid] = card
    if visible is None:
        return tuple({card.index: card for card in by_name.values()}.values())
    kept: list[GpuCard] = []
    for word in filter(None, (part.strip() for part in visible.split(","))):
        if word.startswith("MIG-"):
            kept.append(GpuCard(word, "slice of a GPU (MIG)", inf))
            continue
        names = [name for name in by_name if name == word or _is_short_uuid(word, name)]
        if len(names) != 1:
            break
        kept.append(by_name[names[0]])
    return tuple(kept)


def _memory_bytes(text: str) -> float:
    """Returns the memory in bytes; a card that shares the machine's memory states `[N/A]`."""
    return int(text) * MIB if text.isdecimal() else inf


def _is_short_uuid(word: str, name: str) -> bool:
    return word.startswith("GPU-") and name.startswith(word)


def assign_cards(c: Configuration, cards: Sequence[GpuCard]) -> Mapping[str, tuple[GpuCard, ...]]:
    """Returns the cards of each process by its name; empty without `[devices]`.

    A setting is a number of cards, or a list of positions among `cards`. Numbers take the first
    cards, the trainer before the rollouts. The rollouts' cards are cut into groups of one engine
    each, and rollouts use these in turn. The evaluation shares the first group, or the trainer's
    first cards (`devices.evaluation`). Scorers that hold the reference share the trainer's first.

    Raises `ConfigurationError` for cards that do not exist or cannot be cut into such groups, for
    settings of trainer or engine that do not fit, and for a shared card without enough memory.
    """
    d = c.devices
    if d.trainer is None and d.rollouts is None:
        return {}
    trainer = _positions("devices.trainer", d.trainer, 0, cards)
    after = len(trainer) if isinstance(d.trainer, int) else 0
    rollouts = _positions("devices.rollouts", d.rollouts, after, cards)
    found: dict[str, tuple[int, ...]] = {}
    if trainer:
        found["trainer"] = tuple(trainer)
        _check_trainer(c, len(trainer))
        if c.scoring.holds_reference:
            found |= {f"scorer-{n}": tuple(trainer[:1]) for n in range(c.scoring.count)}
    groups = _groups(c.rollouts, rollouts)
    if groups:
        for number in range(c.rollouts.count):
            found[f"rollout-{number}"] = groups[number % len(groups)]
    if c.evaluation.enabled:
        own = c.rollouts.kind.cards(c.rollouts)
        shared = groups[0] if groups and d.evaluation == "rollouts" else tuple(trainer[:own])
        if len(shared) == own:
            found["eval"] = shared
    _check_overlaps(c, found)
    return {name: tuple(cards[at] for at in positions) for name, positions in found.items()}


def _positions(
    key: str, wanted: int | tuple[int, ...] | None, after: int, cards: Sequence[GpuCard]
) -> list[int]:
    """Returns the positions of the wanted cards; a number takes those that follow the first `after`
    cards. `key` is the setting's name in errors.
    """
    if wanted is None:
        return []
    positions = list(range(after, after + wanted)) if isinstance(wanted, int) else list(wanted)
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
    """Cuts the positions of the rollouts' cards into groups of one engine each."""
    own = rollouts.kind.cards(rollouts)
    if not positions:
        return []
    if rollouts.kind.is_on_cpu(rollouts):
        raise ConfigurationError(
            "rollouts.device must be 'cuda' or 'auto' with devices.rollouts and the engine "
            f"{rollouts.engine!r}"
        )
    if len(positions) % own:
        raise ConfigurationError(
            f"devices.rollouts has {len(positions)} GPUs, and one engine takes {own} "
            "(rollouts.vllm.tensor_parallel and parallel sizes in rollouts.vllm.args): give a "
            "multiple"
        )
    return [tuple(positions[at : at + own]) for at in range(0, len(positions), own)]


def _check_overlaps(c: Configuration, found: Mapping[str, Sequence[int]]) -> None:
    """Raise `ConfigurationError` for a card of several processes if the memory shares of its
    engines are too large together: above `BESIDE_TRAINER` beside a trainer, above 1 otherwise.
    An engine that reserves no share passes.
    """
    users: defaultdict[int, list[str]] = defaultdict(list)
    for name, positions in found.items():
        for at in positions:
            users[at].append(name)
    own = c.rollouts.kind.memory_share(c.rollouts)
    for at, names in sorted(users.items()):
        share = own * sum(not name.startswith(("trainer", "scorer")) for name in names)
        most = BESIDE_TRAINER if "trainer" in names else 1.0
        if len(names) > 1 and share > most:
            raise ConfigurationError(
                f"GPU {at} is given to {', '.join(names)}, whose engines take {share:g} of it "
                f"(rollouts.vllm.memory_share = {own:g} each): at most {most:g} leaves room; lower "
                "the share, or give them other GPUs (devices)"
            )


def visibility(assigned: Mapping[str, Sequence[GpuCard]], name: str) -> dict[str, str]:
    """Returns the environment variables with which the process `name` sees only its own cards.
    Returns none if no cards were assigned to any process.
    """
    if not assigned:
        return {}
    return {VISIBLE: ",".join(card.index for card in assigned.get(name, ())), **ORDER}


_FIRST_PORT, _PORTS = 29_500, 10_000  # of a Slurm job: one of this many ports


def ranks_of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that `torchrun` sets for a rank, made from those of Slurm: each task of
    a job step is one rank, so `srun` can start a trainer's ranks without `torchrun`.

    Returns none outside of a step with several tasks, and if `RANK` or `WORLD_SIZE` is set already.
    All tasks get the same address: the first host and a port made from the job's number, unless
    `MASTER_ADDR` and `MASTER_PORT` name others.
    """
    tasks, task = environment.get("SLURM_STEP_NUM_TASKS"), environment.get("SLURM_PROCID")
    if tasks is None or task is None or int(tasks) < 2 or {"RANK", "WORLD_SIZE"} & {*environment}:
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    sees_one = len(environment.get(VISIBLE, ",").split(",")) == 1  # --gpus-per-task=1
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
