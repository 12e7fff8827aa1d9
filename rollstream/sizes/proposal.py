"""A plan as the settings of a run, as TOML, and as one JSON object.

The settings are those of `rollstream run` on one machine. With several machines every machine gets
the same file and starts its own roles (docs/how-to/several-gpus.md).
"""

import json
from collections.abc import Mapping
from typing import Any

from rollstream.sizes import arithmetic as sums, rates
from rollstream.sizes.arithmetic import MemoryLine, total
from rollstream.sizes.devices import CARDS_PER_MACHINE, GB
from rollstream.sizes.planner import (
    ADAPTER_RANK,
    MEAN_SHARE,
    SAMPLES,
    CardLayout,
    PlanRequest,
    RunPlan,
    usable,
)

PROMPT_SHARE, PROMPT_MAX = 4, 2048
"""A quarter of the context, at most this many tokens, is left to the prompt."""

TABLE_COMMENTS = {
    "model": "a folder, or a Hub name in this machine's cache",
    "devices": "cards of each role",
    "trainer": "masters, optimiser and head stay float32",
    "sampling": "add your [task]: docs/tutorial/own-reward.md",
}


def settings_of(plan: RunPlan) -> dict[str, dict[str, Any]]:
    """The proposed tables of settings of a plan that fits, those of one machine."""
    request, layout = plan.request, plan.layout
    assert layout is not None, "nothing is proposed for a plan that does not fit"
    context = request.context
    vllm: dict[str, Any] = {
        "memory_share": layout.memory_share,
        "tensor_parallel": layout.tensor_parallel,
    }
    if request.fp8:
        vllm["args"] = {"quantization": "fp8"}
        vllm["head_float32"] = False
    engine: dict[str, Any] = {"engine": "vllm", "vllm": vllm}
    if request.lora_rank:
        engine = {"engine": "torch", "device": "cuda", "dtype": "bfloat16"}
    engines, ranks = layout.engines, layout.trainer_cards
    if request.machines > 1:  # of one machine with rollouts
        engines, ranks = max(1, CARDS_PER_MACHINE // layout.tensor_parallel), CARDS_PER_MACHINE
    model: dict[str, Any] = {"path": request.shape.name}
    if request.lora_rank:
        model["lora"] = {"rank": request.lora_rank, "alpha": 2 * request.lora_rank}
    return {
        "model": model,
        "sampling": {"tokens_max": context - min(PROMPT_MAX, context // PROMPT_SHARE)},
        "devices": _devices(request, layout),
        "rollouts": {
            "count": engines,
            "slots": layout.slots,
            "context_max": context,
            **engine,
        },
        "trainer": {
            "device": "cuda",
            "processes": ranks,
            "workers": 1,
            "groups_per_step": request.groups,
            "samples_per_group": SAMPLES,
            "compute": layout.form.compute,
            "gradient_checkpointing": layout.form.recompute,
            "micro_batch_tokens": layout.form.micro_batch_tokens,
            "lr": 1e-5 if request.lora_rank else 1e-6,
        },
        "weights": {"dtype": "bfloat16"},
        "relay": {"enabled": request.machines > 1},
        "evaluation": {"enabled": layout.has_evaluation, "slots": layout.slots},
    }


def _devices(request: PlanRequest, layout: CardLayout) -> dict[str, Any]:
    """Cards by role; on one card all roles share it. Of several machines each has one kind of
    role.
    """
    if layout.is_shared:
        return {"trainer": [0], "rollouts": [0]}
    if request.machines > 1:
        return {}
    return {"trainer": layout.trainer_cards, "rollouts": request.cards - layout.trainer_cards}


def toml_text(plan: RunPlan) -> str:
    """The proposed settings as a TOML file that `rollstream run` takes."""
    request = plan.request
    lines = [f"# {request.shape.name} on {request.cards} x {request.card.name}, by arithmetic"]
    for table, values in settings_of(plan).items():
        lines += _table_lines(table, values)
    return "\n".join(lines) + "\n"


def _table_lines(table: str, values: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    comment = TABLE_COMMENTS.get(table)
    lines: list[str] = []
    if plain:
        lines = ["", f"[{table}]" + (f"   # {comment}" if comment else "")]
        lines += [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _table_lines(f"{table}.{key}", value)  # pyright: ignore[reportUnknownArgumentType]
    return lines


def figures(plan: RunPlan) -> dict[str, Any]:
    """The plan as one JSON object: bytes, seconds, tokens."""
    request = plan.request
    found: dict[str, Any] = {
        "model": request.shape.name,
        "parameters": request.shape.parameters,
        "active_parameters": request.shape.active_parameters,
        "gpus": request.cards,
        "gpu": request.card.name,
        "gpu_bytes": request.card.memory,
        "context": request.context,
        "fits": plan.layout is not None,
        "shortages": [
            {
                "role": s.role,
                "needed": s.needed,
                "available": s.available,
                "lines": _line_map(s.lines),
            }
            for s in plan.shortages
        ],
        "change": None if plan.change is None else change_text(plan),
    }
    proposed = plan.proposed
    if proposed is not None:
        found |= _proposed_figures(proposed)
    return found


def _proposed_figures(plan: RunPlan) -> dict[str, Any]:
    request, layout = plan.request, plan.layout
    assert layout is not None
    shape = request.shape
    versions = rates.version_bytes(shape, request.lora_rank or ADAPTER_RANK)
    mean = request.context / MEAN_SHARE
    volume = rates.log_volume(layout.tokens_per_s, mean)
    return {
        "trainer_gpus": layout.trainer_cards,
        "rollouts": layout.engines,
        "tensor_parallel": layout.tensor_parallel,
        "trainer_bytes": _line_map(trainer_lines(plan)),
        "trainer_usable_bytes": usable(request.card),
        "trainer_host_bytes": _line_map(host_lines(plan)),
        "rollout_bytes": _line_map(rollout_lines(plan)),
        "micro_batch_tokens": layout.form.micro_batch_tokens,
        "micro_batch_tokens_max": layout.micro_batch_max,
        "kv_tokens": layout.kv_tokens,
        "kv_slots": layout.kv_tokens // request.context,
        "version_bytes": {
            "full": versions.full, "delta": versions.delta, "adapter": versions.adapter,
        },
        "seconds": transfer_seconds(plan),
        "step_tokens": request.step_tokens,
        "round_seconds": round_seconds(plan),
        "train_tokens_per_s": layout.train_tokens_per_s,
        "rollout_tokens_per_s": layout.rollout_tokens_per_s,
        "log_bytes_per_day": 86_400 * volume.log,
        "archive_bytes_per_day": 86_400 * volume.archive,
        "settings": settings_of(plan),
    }  # fmt: skip


def trainer_lines(plan: RunPlan) -> tuple[MemoryLine, ...]:
    """A rank's lines in the plan's layout."""
    assert plan.layout is not None
    return sums.trainer_lines(plan.request.shape, plan.layout.form)


def host_lines(plan: RunPlan) -> tuple[MemoryLine, ...]:
    """A rank's host memory in the plan's layout."""
    assert plan.layout is not None
    return sums.trainer_host_lines(plan.request.shape, plan.layout.form, sums.BFLOAT16)


def rollout_lines(plan: RunPlan) -> tuple[MemoryLine, ...]:
    """One card of an engine in the plan's layout, its cache included."""
    request, layout = plan.request, plan.layout
    assert layout is not None
    if request.lora_rank:
        return sums.torch_engine_lines(request.shape, layout.slots, request.context, sums.BFLOAT16)
    lines = sums.vllm_lines(
        request.shape, layout.tensor_parallel, layout.slots, request.weight_item
    )
    cache = request.card.memory * layout.memory_share - total(lines)
    return (*lines, MemoryLine("KV cache", cache))


def transfer_seconds(plan: RunPlan) -> dict[str, dict[str, float]]:
    """Seconds by form of a version: to publish it over the store's link; to fetch it from there by
    one rollout machine; from machine to machine, which a relay chain pipelines; and from host
    memory into the cards of one engine.
    """
    request, layout = plan.request, plan.layout
    assert layout is not None
    versions = rates.version_bytes(request.shape, request.lora_rank or ADAPTER_RANK)
    found: dict[str, dict[str, float]] = {}
    for kind, size in (
        ("full", versions.full), ("delta", versions.delta), ("adapter", versions.adapter)
    ):  # fmt: skip
        found[kind] = {
            "publish": rates.transfer_s(size, request.store_gbps),
            "fetch": rates.transfer_s(size, min(request.store_gbps, request.network_gbps)),
            "relay": rates.transfer_s(size, request.network_gbps),
            "load": rates.load_s(size, layout.tensor_parallel),
        }
    return found


def round_seconds(plan: RunPlan) -> dict[str, float]:
    """Seconds of a training round by what they are for; empty where the card's speed is unknown."""
    request, layout = plan.request, plan.layout
    assert layout is not None
    if not request.card.flops:
        return {}
    link = request.link(layout.form.ranks)
    compute_s, collectives_s = rates.round_s(request.shape, layout.form, link)
    return {"compute": compute_s, "collectives": collectives_s}


def change_text(plan: RunPlan) -> str:
    """The cheapest change that fits, as an instruction."""
    assert plan.change is not None
    before, after = plan.request, plan.change.request
    parts: list[str] = []
    if after.lora_rank != before.lora_rank:
        parts.append(f"train an adapter (model.lora.rank = {after.lora_rank})")
    if after.fp8 != before.fp8:
        parts.append('serve 8-bit weights (rollouts.vllm.args.quantization = "fp8")')
    if after.cards != before.cards:
        parts.append(f"take {after.cards} cards")
    return " and ".join(parts)


def shortage_text(plan: RunPlan) -> str:
    """One sentence: what does not fit, and the cheapest change."""
    what = "; ".join(
        f"{s.role} needs {s.needed / GB:.1f} GB of {s.available / GB:.1f} GB"
        for s in plan.shortages
    )
    advice = "no change of this plan fits" if plan.change is None else change_text(plan)
    return f"{what}: {advice}"


def _line_map(lines: tuple[MemoryLine, ...]) -> dict[str, float]:
    return {line.what: line.bytes for line in lines}
