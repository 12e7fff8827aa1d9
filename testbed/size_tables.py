"""The generated tables of `docs/explanation/sizes.md`, from today's arithmetic: plans for one card,
and Llama 3.1 405B line by line (`testbed/reference_pages.py` writes them into the page).
"""

from collections.abc import Iterator, Sequence

from rollstream.plan import proposal
from rollstream.plan.engines import ADAPTER_RANK, PlanRequest, usable
from rollstream.plan.planner import CardLayout, RunPlan, plan_run, shortages_of, trainer_form
from rollstream.run.sizes import arithmetic as sums, vllm_memory
from rollstream.run.sizes.arithmetic import MemoryLine, total
from rollstream.run.sizes.devices import GB, parse_gpus
from rollstream.run.sizes.shapes import SHAPES

CONTEXT = 4096
LARGE, LARGE_GPUS = "llama-3.1-405b", "1024xH200"
SMALL = [(size, gigabytes) for size in ("0.5b", "1.5b", "3b") for gigabytes in (24, 48, 80)]
LARGER_STEP = 1024  # groups


def _request(
    model: str, gpus: str, lora: int = 0, groups: int = 128, network_gbps: float = 3200
) -> PlanRequest:
    cards, card = parse_gpus(gpus)
    return PlanRequest(
        shape=SHAPES[model],
        card=card,
        cards=cards,
        context=CONTEXT,
        store_gbps=400,
        network_gbps=network_gbps,
        lora_rank=lora,
        groups=groups,
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
    yield from _card_lines(0)


def one_card_adapter_lines() -> Iterator[str]:
    yield from _card_lines(ADAPTER_RANK)


def _card_lines(lora: int) -> Iterator[str]:
    yield "| model | card | trainer | rollout | as asked |"
    yield "|---|---|---|---|---|"
    for size, gigabytes in SMALL:
        plan = plan_run(_request(f"qwen2.5-{size}", f"1x{gigabytes}GB", lora))
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


def step_lines() -> Iterator[str]:
    """The step of the default size and a larger one."""
    yield "| trajectories of a step | train | generate | training | generating | a step |"
    yield "|---|---|---|---|---|---|"
    for groups in (128, LARGER_STEP):
        plan, layout = _fitting(_request(LARGE, LARGE_GPUS, groups=groups))
        request = plan.request
        cells = (
            f"{_number(request.trajectories)} (`--groups {groups}`)",
            f"{layout.trainer_cards} cards",
            f"{layout.engines} engines of {layout.engine.tensor_parallel} cards",
            f"{_number(layout.train_tokens_per_s)} tokens/s",
            f"{_number(layout.rollout_tokens_per_s)} tokens/s",
            f"{request.step_tokens / layout.tokens_per_s:.1f} s",
        )
        yield f"| {' | '.join(cells)} |"


def round_lines() -> Iterator[str]:
    """A round of training over two networks."""
    yield "| network between machines | a round computes | a round gathers and reduces |"
    yield "|---|---|---|"
    for gbps in (3200, 100):
        plan, _ = _fitting(_request(LARGE, LARGE_GPUS, network_gbps=gbps))
        spent = proposal.round_seconds(plan)
        yield f"| {gbps} Gbit/s | {spent['compute']:.1f} s | {spent['collectives']:.1f} s |"


def version_lines() -> Iterator[str]:
    plan, _ = _fitting(_request(LARGE, LARGE_GPUS))
    sizes = proposal.figures(plan)["version_bytes"]
    yield "| version | GB | store | relay | into 8 cards |"
    yield "|---|---|---|---|---|"
    for kind, seconds in proposal.transfer_seconds(plan).items():
        times = " | ".join(f"{seconds[name]:.3g} s" for name in ("fetch", "relay", "load"))
        yield f"| {kind} | {sizes[kind] / GB:.3g} | {times} |"


def shortage_lines() -> Iterator[str]:
    """What does not fit on cards of 80 GB."""
    request = _request(LARGE, "1024xH100")
    yield "| on 1 024 H100 of 80 GB | GB |"
    yield "|---|---|"
    for one in shortages_of(request):
        role = f"{one.role}: does not fit"
        yield f"| **{role}** | **{one.needed / GB:.1f}** of {one.available / GB:.1f} |"
    ranks = trainer_form(request, 1 << 20, recompute=True)
    kept = [one for one in sums.trainer_lines(request.shape, ranks) if one.what != sums.STATE]
    yield f"| of the trainer's, with any number of ranks | {total(kept) / GB:.1f} |"
    for one in kept:
        if one.bytes:
            yield f"| {one.what} | {one.bytes / GB:.2f} |"


def llamarl_lines() -> Iterator[str]:
    """The plan beside the figures that LlamaRL publishes."""
    (plan, layout), (larger, other) = (
        _fitting(_request(LARGE, LARGE_GPUS, groups=groups)) for groups in (128, LARGER_STEP)
    )
    steps = [
        f"{one.request.step_tokens / at.tokens_per_s:.1f} s for "
        f"{one.request.step_tokens / 1e6:.2f} million tokens"
        for one, at in ((plan, layout), (larger, other))
    ]
    splits = " or ".join(
        f"{at.trainer_cards} train and {at.engines * at.engine.tensor_parallel} generate"
        for at in (layout, other)
    )
    full = proposal.transfer_seconds(plan)["full"]
    sizes = proposal.figures(plan)["version_bytes"]
    moved = (
        f"full: {full['fetch']:.1f} s over the store's link beside training, then "
        f"{full['relay']:.2f} s from machine to machine and {full['load']:.2f} s into the cards; "
        "a delta at lr 1e-6: "
        f"1 / {sizes['full'] / sizes['delta']:.0f} of it"
    )
    weights = "GPU to GPU, below 2 s by secondary reports"
    apart = "trainer and generators are apart, updates are synchronous copies"
    waits = "the trainer waits for no transfer; an engine stands still while a version is loaded"
    yield "| | LlamaRL, measured | this plan, arithmetic |"
    yield "|---|---|---|"
    yield f"| one step | 59.5 s; its synchronous baseline 635.8 s | {', '.join(steps)} |"
    yield f"| split of the cards | not in our sources | {splits}: it follows the size of a step |"
    yield f"| weights to the generators | {weights} | {moved} |"
    yield f"| who waits | {apart} | {waits} |"
    yield "| memory per process | not published | the table above |"
