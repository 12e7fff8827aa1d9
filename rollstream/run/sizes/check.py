"""Refuses, before any role starts, a run whose model cannot fit into its GPUs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rollstream.consumers.objective_settings import named_version
from rollstream.errors import ConfigurationError
from rollstream.printable import shell_command
from rollstream.run.config.settings import Configuration
from rollstream.run.sizes import arithmetic as sums
from rollstream.run.sizes.arithmetic import total
from rollstream.run.sizes.devices import GB
from rollstream.run.sizes.shapes import ModelShape, shape_of
from rollstream.run.sizes.vllm_memory import vllm_lines
from rollstream.run.supervisor.cards import GpuCard
from rollstream.storage.model_folder.hf_folder import find_hf_folder, read_hf_config


def uses_gpus(c: Configuration) -> bool:
    has_devices = c.devices.trainer is not None or c.devices.rollouts is not None
    return has_devices or _generates_on_gpus(c) or _trains_on_gpus(c)


def _trains_on_gpus(c: Configuration) -> bool:
    return c.has_model and c.trainer.device != "cpu"


def _generates_on_gpus(c: Configuration) -> bool:
    return "cuda" in c.rollouts.kind.computes_on(c.rollouts)


def unassigned_use(c: Configuration, cards: Sequence[GpuCard]) -> dict[str, Sequence[GpuCard]]:
    """Returns the cards if `[devices]` assigns none: each process sees all `cards` and takes
    consecutive ones.
    """
    r, cards_by_process = c.rollouts, dict[str, Sequence[GpuCard]]()
    if _trains_on_gpus(c):
        # `cuda:1`; scorers with the reference share its first card.
        first = int(c.trainer.device.partition(":")[2] or 0)
        cards_by_process["trainer"] = cards[first : first + c.trainer.processes]
        if c.scoring.holds_reference:
            cards_by_process |= {
                f"scorer-{n}": cards[first : first + 1] for n in range(c.scoring.count)
            }
    if _generates_on_gpus(c):
        for number in range(r.count):
            cards_by_process[f"rollout-{number}"] = cards[: r.kind.cards(r)]
        if c.evaluation.enabled:
            cards_by_process["eval"] = cards[: r.kind.cards(r)]
    return cards_by_process


def lone_use(
    c: Configuration, command: str, cards: Sequence[GpuCard]
) -> dict[str, Sequence[GpuCard]]:
    """Returns the lone use of a role that was started alone (`rollstream train`, `rollstream
    rollout`); {} for other commands.
    """
    if command == "train" and _trains_on_gpus(c):
        # One card stands for all: ranks need equal memory.
        return {"trainer": unassigned_use(c, cards)["trainer"][:1]}
    if command == "rollout" and _generates_on_gpus(c):
        return {"rollout": cards[: c.rollouts.kind.cards(c.rollouts)]}
    return {}


def check_memory(
    c: Configuration,
    model: Path,
    used: Mapping[str, Sequence[GpuCard]],
    ranks: int | None = None,
) -> None:
    """Raises `ConfigurationError` if the processes on a card need more memory than it has. `used`
    maps each process to its cards; `ranks` are the trainer's processes on all machines (None:
    `trainer.processes`). A family whose parameters are not counted (`shape_of`) passes unchecked.
    """
    try:
        shape = shape_of(read_hf_config(model), model.name)
    except ConfigurationError:
        return  # a family that is not counted, or a wrong folder, which the loader will report
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
    """Returns the least memory that one process needs on one card, in bytes.

    * A trainer of several ranks: with micro-batches of the configured size.
    * A trainer of one rank, which halves a micro-batch that does not fit: with at most one longest
      sequence.
    * A scorer with the reference: its weights.
    * An engine that reserves a share (vLLM, `rollouts.vllm.memory_share`): this, at least its
      weights, workspaces and the KV cache of one longest sequence.
    * Another engine: its weights, and its caches for all slots.
    """
    r, context = c.rollouts, c.rollouts.context_max
    if process == "trainer":
        form = sums.form_of(c.trainer, ranks or c.trainer.processes, c.model.lora.rank)
        if form.ranks == 1:
            tokens = min(form.micro_batch_tokens, context)
            form = replace(form, micro_batch_tokens=tokens, workers=1)
        return total(sums.trainer_lines(shape, form)) + sums.CONTEXT_BYTES
    if process.startswith("scorer"):
        return sums.reference_bytes(_reference_shape(c, shape), c.trainer) + sums.CONTEXT_BYTES
    if share := r.kind.memory_share(r):
        # The evaluation serves whole weights, so no adapter takes room.
        lora_rank = 0 if process == "eval" else c.model.lora.rank
        engine = vllm_lines(shape, r.kind.cards(r), 1, _weight_item(c), lora_rank)
        cache = sums.BFLOAT16 * shape.kv_numbers * context / r.kind.cards(r)
        return max(card.memory * share, total(engine) + cache)
    slots = r.slots if process.startswith("rollout") else c.evaluation.slots
    item = sums.FLOAT32 if r.dtype == "float32" else sums.BFLOAT16
    lines = sums.torch_engine_lines(shape, slots, context, item)
    return total(lines) + sums.CONTEXT_BYTES


def _reference_shape(c: Configuration, shape: ModelShape) -> ModelShape:
    if named_version(c.trainer.reference, 0) is not None:
        # A version of the run's model.
        return shape
    folder = find_hf_folder(c.trainer.reference)
    try:
        return shape_of(read_hf_config(folder), folder.name)
    except ConfigurationError:
        return shape


def _weight_item(c: Configuration) -> float:
    # The least that any of vLLM's quantisations needs.
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
        f"(`{shell_command('plan', c.model.path or 'MODEL')} --gpus …` proposes a configuration)"
    )
