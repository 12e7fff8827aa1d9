"""Refuses a run whose model cannot fit the GPUs that its roles get, before any role is started. The
check adds up, card by card, the least memory of the processes on it (`needed_bytes`), and
`check_memory` raises an error that names the card, the need and a change.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError
from rollstream.sizes import arithmetic as sums
from rollstream.sizes.arithmetic import total
from rollstream.sizes.devices import GB
from rollstream.sizes.shapes import ModelShape, shape_of
from rollstream.storage.hf_folder import read_hf_config
from rollstream.supervisor.cards import GpuCard, cards_per_engine


def uses_gpus(c: Configuration) -> bool:
    """Returns whether a role of this run may compute on a GPU."""
    has_devices = c.devices.trainer is not None or c.devices.rollouts is not None
    return has_devices or _generates_on_gpus(c) or _trains_on_gpus(c)


def _trains_on_gpus(c: Configuration) -> bool:
    return c.trainer.learner == "torch" and c.trainer.device != "cpu"


def _generates_on_gpus(c: Configuration) -> bool:
    r = c.rollouts
    return (r.engine == "vllm" and not r.has_server) or (r.engine == "torch" and r.device != "cpu")


def unassigned_use(c: Configuration, cards: Sequence[GpuCard]) -> dict[str, Sequence[GpuCard]]:
    """Returns, by process, the cards that it takes by itself where `[devices]` assigns none:
    consecutive ones from the first visible card.
    """
    r, found = c.rollouts, dict[str, Sequence[GpuCard]]()
    if _trains_on_gpus(c):
        first = int(c.trainer.device.partition(":")[2] or 0)
        found["trainer"] = cards[first : first + c.trainer.processes]
    if _generates_on_gpus(c):
        for number in range(r.count):
            found[f"rollout-{number}"] = cards[: cards_per_engine(r)]
        if c.evaluation.enabled:
            found["eval"] = cards[: cards_per_engine(r)]
    return found


def lone_use(
    c: Configuration, command: str, cards: Sequence[GpuCard]
) -> dict[str, Sequence[GpuCard]]:
    """Returns the cards of a role that is started alone, by its command. For a trainer one card
    stands for all, because its ranks need equal memory.
    """
    if command == "train" and _trains_on_gpus(c):
        return {"trainer": unassigned_use(c, cards)["trainer"][:1]}
    if command == "rollout" and _generates_on_gpus(c):
        return {"rollout": cards[: cards_per_engine(c.rollouts)]}
    return {}


def check_memory(
    c: Configuration,
    model: Path,
    used: Mapping[str, Sequence[GpuCard]],
    ranks: int | None = None,
) -> None:
    """Raise `ConfigurationError` if a card cannot hold the least memory of its processes; the
    message is one sentence with the need and a change. `used` maps a process to its cards; `ranks`
    is the number of the trainer's processes on all machines, where it is not `trainer.processes`. A
    model whose parameters are not counted (`shape_of`) passes unchecked. A trainer of one rank
    halves a micro-batch that is too large, so the configured size does not count there.
    """
    try:
        shape = shape_of(read_hf_config(model), model.name)
    except ConfigurationError:
        return  # an uncounted family; a folder that is wrong is reported by the loader
    needs: defaultdict[GpuCard, dict[str, float]] = defaultdict(dict)
    for name, cards in used.items():
        for card in cards:
            needs[card][name] = needed_bytes(c, shape, name, card, ranks)
    for card, parts in needs.items():
        needed = sum(parts.values())
        if needed > card.memory:
            raise ConfigurationError(_refusal(c, shape, card, parts))


def needed_bytes(
    c: Configuration, shape: ModelShape, process: str, card: GpuCard, ranks: int | None = None
) -> float:
    """Returns the least memory of one process on one card, in bytes. A lone trainer rank counts a
    micro-batch of one longest sequence, several ranks count the configured one. A vLLM engine takes
    its whole share, and at least the KV cache of one longest sequence.
    """
    r, context = c.rollouts, c.rollouts.context_max
    if process == "trainer":
        form = sums.form_of(c.trainer, ranks or c.trainer.processes, c.model.lora.rank)
        if form.ranks == 1:
            tokens = min(form.micro_batch_tokens, context)
            form = replace(form, micro_batch_tokens=tokens, workers=1)
        return total(sums.trainer_lines(shape, form)) + sums.CONTEXT_BYTES
    if r.engine == "vllm":
        # The evaluation serves whole weights, so no adapter takes room.
        lora_rank = 0 if process == "eval" else c.model.lora.rank
        engine = sums.vllm_lines(shape, cards_per_engine(r), 1, _weight_item(c), lora_rank)
        cache = sums.BFLOAT16 * shape.kv_numbers * context / cards_per_engine(r)
        return max(card.memory * r.vllm.memory_share, total(engine) + cache)
    slots = r.slots if process.startswith("rollout") else c.evaluation.slots
    item = sums.FLOAT32 if r.dtype == "float32" else sums.BFLOAT16
    lines = sums.torch_engine_lines(shape, slots, context, item)
    return total(lines) + sums.CONTEXT_BYTES


def _weight_item(c: Configuration) -> float:
    """Returns the bytes of a weight in vLLM. A quantised one counts half a byte, the least that any
    method has.
    """
    return 0.5 if c.rollouts.vllm.args.get("quantization") else sums.BFLOAT16


def _refusal(c: Configuration, shape: ModelShape, card: GpuCard, parts: Mapping[str, float]) -> str:
    roles = ", ".join(f"{name} {size / GB:.1f} GB" for name, size in parts.items())
    if "trainer" in parts and len(parts) == 1:
        advice = "train on more GPUs (trainer.processes and devices.trainer, or more machines)"
        if not c.trainer.cpu_offload:
            advice = "set trainer.cpu_offload = true, or " + advice
        if not c.trainer.gradient_checkpointing:
            advice = "set trainer.gradient_checkpointing = true, or " + advice
    elif "trainer" in parts:
        advice = "lower rollouts.vllm.memory_share, or give the roles GPUs of their own (devices)"
    else:
        advice = "raise rollouts.vllm.tensor_parallel, or lower rollouts.slots and context_max"
    return (
        f"the run does not fit: GPU {card.index} ({card.name}) has {card.memory / GB:.1f} GB, and "
        f"{shape.parameters / GB:.2f} billion parameters need at least {roles} there; {advice} "
        f"(`rollstream plan {c.model.path or 'MODEL'} --gpus …` proposes a configuration)"
    )
