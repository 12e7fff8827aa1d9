"""The generated tables of `docs/explanation/sizes.md`, from today's arithmetic: plans for one card,
and Llama 3.1 405B line by line (`testbed/reference_pages.py` writes them into the page).
"""

from collections.abc import Iterator, Sequence

from rollstream.plan import proposal
from rollstream.plan.engines import PlanRequest, usable
from rollstream.plan.planner import CardLayout, RunPlan, plan_run
from rollstream.run.sizes import arithmetic as sums, vllm_memory
from rollstream.run.sizes.arithmetic import MemoryLine, total
from rollstream.run.sizes.devices import GB, parse_gpus
from rollstream.run.sizes.shapes import SHAPES

CONTEXT = 4096
LARGE, LARGE_GPUS = "llama-3.1-405b", "1024xH200"
SMALL = [(size, gigabytes) for size in ("0.5b", "1.5b", "3b") for gigabytes in (24, 48, 80)]


def _request(model: str, gpus: str) -> PlanRequest:
    cards, card = parse_gpus(gpus)
    return PlanRequest(
        shape=SHAPES[model],
        card=card,
        cards=cards,
        context=CONTEXT,
        store_gbps=400,
        network_gbps=3200,
    )


def _fitting(request: PlanRequest) -> tuple[RunPlan, CardLayout]:
    """The plan of a request that fits, and its layout."""
    plan = plan_run(request)
    assert plan.layout is not None, "the page has plans that fit"
    return plan, plan.layout


def _number(value: float) -> str:
    """A whole number in groups of three digits."""
    return f"{value:,.0f}".replace(",", " ")


# ---- one card ------------------------------------------------------------------------------------


def one_card_lines() -> Iterator[str]:
    yield "| model | card | trainer | rollout | as asked |"
    yield "|---|---|---|---|---|"
    for size, gigabytes in SMALL:
        plan = plan_run(_request(f"qwen2.5-{size}", f"1x{gigabytes}GB"))
        proposed = plan.proposed
        assert proposed is not None
        assert proposed.layout is not None
        fits = "fits" if plan.layout is not None else f"no: {_shortage(plan)}"
        yield f"| {size} | {gigabytes} GB | {_trainer(proposed)} | {_rollout(proposed)} | {fits} |"


def _trainer(plan: RunPlan) -> str:
    assert plan.layout is not None
    form, needed = plan.layout.form, total(proposal.trainer_lines(plan)) / GB
    layers = "recomputed" if form.recompute else "kept"
    return f"{needed:.1f} GB, micro-batch {form.micro_batch_tokens}, layers {layers}"


def _rollout(plan: RunPlan) -> str:
    assert plan.layout is not None
    engine = plan.layout.engine
    share = f"share {engine.memory_share:g}" if engine.name == "vllm" else f"{engine.slots} slots"
    name = "vLLM" if engine.name == "vllm" else "`torch`"
    beside = ", evaluation beside" if engine.has_evaluation else ""
    return f"{name}, {share}, {engine.kv_tokens // CONTEXT} longest sequences{beside}"


def _shortage(plan: RunPlan) -> str:
    found = [
        f"{one.role} {one.needed / GB:.1f} of {one.available / GB:.1f} GB" for one in plan.shortages
    ]
    return f"{', '.join(found)}; {proposal.change_text(plan)}"


# ---- 405B ----------------------------------------------------------------------------------------


def memory_lines() -> Iterator[str]:
    """All lines of a trainer's rank and of a rollout's card."""
    plan, layout = _fitting(_request(LARGE, LARGE_GPUS))
    shape, card, engine = plan.request.shape, plan.request.card, layout.engine
    root, layer = shape.root_parameters / 1e9, shape.layer_parameters / 1e9
    tokens, cards = _number(layout.form.micro_batch_tokens), engine.tensor_parallel
    origin = {
        sums.STATE: "16 bytes of the rows that a rank holds",
        "gathered embedding and head": f"{root:.1f} billion parameters in float32",
        "gathered layers": f"2 layers of {layer:.1f} billion parameters in bfloat16",
        "gradients of one layer, to reduce": "bfloat16, and their float32 copy",
        "gradient of the head": "float32",
        "activations of a micro-batch": f"{tokens} tokens: the input of {shape.layers} "
        "layers, and one layer recomputed",
        "head and logits": "four slices of 64 MiB, states before the head",
        "copies being published": "the embedding, whole at its owner in bfloat16, twice",
        "checkpoint being written": "12 bytes of the rows that a rank holds",
        sums.WEIGHTS: f"2 bytes a parameter and a float32 head, over {cards} cards",
        "activations of a step": f"{_number(vllm_memory.VLLM_STEP_TOKENS)} tokens",
        "logits": "float32, of all slots",
        "graphs and workspaces": "a choice (`vllm_memory.py`)",
        "KV cache": f"the rest: {_number(engine.kv_tokens)} tokens of an engine, "
        f"{engine.kv_tokens // CONTEXT} longest sequences",
    }  # fmt: skip
    parts: Sequence[tuple[str, str, tuple[MemoryLine, ...], str]] = (
        (
            f"trainer, each of {layout.trainer_cards} cards",
            f" of {usable(card) / GB:.1f}",
            proposal.trainer_lines(plan),
            "",
        ),
        ("trainer, host memory of a rank", "", proposal.host_lines(plan), ""),
        (
            f"rollout, each of {engine.tensor_parallel} cards of {layout.engines} engines",
            "",
            proposal.rollout_lines(plan),
            f"`memory_share` {engine.memory_share:g} of {card.memory / GB:g}",
        ),
    )
    yield "| line | GB | where it comes from |"
    yield "|---|---|---|"
    for title, of, lines, where in parts:
        yield f"| **{title}** | **{total(lines) / GB:.1f}**{of} | {where} |"
        for line in lines:
            if line.bytes:
                yield f"| {line.what} | {line.bytes / GB:.2f} | {origin.get(line.what, '')} |"
