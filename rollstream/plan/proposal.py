"""Presents a `RunPlan`. Only a plan that fits has memory lines and seconds."""

from typing import Any

from rollstream.plan import rates
from rollstream.plan.engines import ADAPTER_RANK, MEAN_SHARE, engine_lines, usable
from rollstream.plan.planner import RunPlan
from rollstream.plan.proposed_files import machine_files
from rollstream.run.sizes import arithmetic as sums
from rollstream.run.sizes.arithmetic import MemoryLine
from rollstream.run.sizes.devices import GB


def figures(plan: RunPlan) -> dict[str, Any]:
    """One JSON object in bytes, seconds and tokens."""
    request = plan.request
    json_object: dict[str, Any] = {
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
        json_object |= _proposed_figures(proposed)
    return json_object


def _proposed_figures(plan: RunPlan) -> dict[str, Any]:
    request, layout = plan.request, plan.layout
    assert layout is not None
    files = machine_files(plan)
    versions = rates.version_bytes(request.shape, request.lora_rank or ADAPTER_RANK)
    mean = request.context / MEAN_SHARE
    volume = rates.log_volume(layout.tokens_per_s, mean)
    return {
        "trainer_gpus": layout.trainer_cards,
        "rollouts": layout.engines,
        "engine": layout.engine.name,
        "engine_reason": layout.engine.reason,
        "tensor_parallel": layout.engine.tensor_parallel,
        "trainer_bytes": _line_map(trainer_lines(plan)),
        "trainer_usable_bytes": usable(request.card),
        "trainer_host_bytes": _line_map(host_lines(plan)),
        "rollout_bytes": _line_map(rollout_lines(plan)),
        "micro_batch_tokens": layout.form.micro_batch_tokens,
        "micro_batch_tokens_max": layout.micro_batch_max,
        "kv_tokens": layout.engine.kv_tokens,
        "kv_slots": layout.engine.kv_tokens // request.context,
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
        "settings": files[0].settings,
        "files": [
            {
                "kind": file.kind,
                "machines": file.machines,
                "settings": file.settings,
                "commands": file.commands(file.name("plan.toml")),
            }
            for file in files
        ],
    }  # fmt: skip


def trainer_lines(plan: RunPlan) -> tuple[MemoryLine, ...]:
    assert plan.layout is not None
    return sums.trainer_lines(plan.request.shape, plan.layout.form)


def host_lines(plan: RunPlan) -> tuple[MemoryLine, ...]:
    assert plan.layout is not None
    return sums.trainer_host_lines(plan.request.shape, plan.layout.form, sums.BFLOAT16)


def rollout_lines(plan: RunPlan) -> tuple[MemoryLine, ...]:
    """Returns the rollout lines of an engine on one of its cards."""
    request, layout = plan.request, plan.layout
    assert layout is not None
    return engine_lines(request, layout.engine)


def transfer_seconds(plan: RunPlan) -> dict[str, dict[str, float]]:
    """Returns seconds by the form of a version (full, delta, adapter) and by transfer: `publish` to
    the store, `fetch` from there to one machine, `relay` from one machine to the next (overlaps in
    a chain), `load` from host memory into the cards of one engine.
    """
    request, layout = plan.request, plan.layout
    assert layout is not None
    versions = rates.version_bytes(request.shape, request.lora_rank or ADAPTER_RANK)
    seconds: dict[str, dict[str, float]] = {}
    for kind, size in (
        ("full", versions.full), ("delta", versions.delta), ("adapter", versions.adapter)
    ):  # fmt: skip
        seconds[kind] = {
            "publish": rates.transfer_s(size, request.store_gbps),
            "fetch": rates.transfer_s(size, min(request.store_gbps, request.network_gbps)),
            "relay": rates.transfer_s(size, request.network_gbps),
            "load": rates.load_s(size, layout.engine.tensor_parallel),
        }
    return seconds


def round_seconds(plan: RunPlan) -> dict[str, float]:
    """Returns the seconds of a training round's arithmetic and of its collectives, which overlap;
    empty for unknown speeds.
    """
    request, layout = plan.request, plan.layout
    assert layout is not None
    if not request.card.flops:
        return {}
    link = request.link(layout.form.ranks)
    compute_s, collectives_s = rates.round_s(request.shape, layout.form, link)
    return {"compute": compute_s, "collectives": collectives_s}


def change_text(plan: RunPlan) -> str:
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
