"""Presents an `UnlikePlan` as text, JSON and configuration files."""

from dataclasses import replace
from typing import Any

from rollstream.plan.engines import EngineSize, PlanRequest
from rollstream.plan.planner import CardLayout, RunPlan
from rollstream.plan.proposed_files import MachineFile, run_settings, toml_text
from rollstream.plan.unlike import KindWork, UnlikePlan
from rollstream.run.sizes.devices import CARDS_PER_MACHINE


def figures(plan: UnlikePlan) -> dict[str, Any]:
    return {
        "model": plan.request.shape.name,
        "context": plan.request.context,
        "fits": True,
        "kinds": [_kind_figures(work) for work in plan.works],
        "micro_batch_tokens": plan.form.micro_batch_tokens,
        "train_tokens_per_s": plan.train_tokens_per_s,
        "rollout_tokens_per_s": plan.rollout_tokens_per_s,
        "tokens_per_s": plan.tokens_per_s,
        "price_per_hour": plan.per_hour,
        "price_per_million_tokens": million_price(plan.per_hour, plan.tokens_per_s),
        "alike_tokens_per_s": 0.0 if plan.alike is None else plan.alike.tokens_per_s,
        "alike_fits": plan.alike is not None,
        "files": [
            {
                "kind": file.kind,
                "gpu": file.card,
                "machines": file.machines,
                "settings": file.settings,
                "commands": file.commands(file.name("plan.toml")),
            }
            for file, _ in machine_files(plan)
        ],
    }


def _kind_figures(work: KindWork) -> dict[str, Any]:
    engine = work.engine
    return {
        "gpu": work.kind.card.name,
        "gpus": work.kind.cards,
        "price": work.kind.price,
        "trainer_gpus": work.trainer_cards,
        "rollouts": work.engines,
        "tensor_parallel": 0 if engine is None else engine.tensor_parallel,
        "slots": 0 if engine is None else engine.slots,
        "kv_tokens": 0 if engine is None else engine.kv_tokens,
        "tokens_per_s": work.tokens_per_s,
        "request_tokens_per_s": work.request_per_s,
        "answer_tokens_max": work.answers_max,
    }


def million_price(per_hour: float, tokens_per_s: float) -> float:
    """Returns the million price of trained tokens; 0 where it is unknown."""
    return per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s else 0.0


def account(plan: UnlikePlan) -> str:
    lines = [_work_line(work) for work in plan.works]
    lines.append(
        f"tokens/s: training {plan.train_tokens_per_s:,.0f}, generating "
        f"{plan.rollout_tokens_per_s:,.0f}; a step of {plan.request.trajectories} trajectories "
        f"takes {plan.request.step_tokens / plan.tokens_per_s:,.1f} s"
    )
    lines.append(
        f"micro-batch: {plan.form.micro_batch_tokens} tokens, layers "
        f"{'recomputed' if plan.form.recompute else 'kept'}"
    )
    if plan.per_hour:
        price = million_price(plan.per_hour, plan.tokens_per_s)
        lines.append(f"price: {plan.per_hour:,.2f} an hour, {price:,.3f} a million trained tokens")
    lines.append(_alike_line(plan))
    for file, _ in machine_files(plan):
        lines.append(f"{file.kind} on {file.machines} x {file.card}:")
        lines += [f"  {command}" for command in file.commands(file.name("plan.toml"))]
    lines.append("the proposed configuration: --toml -")
    return "\n".join(lines)


def _work_line(work: KindWork) -> str:
    parts = [f"{work.trainer_cards} train"] if work.trainer_cards else []
    if work.engine is not None and work.engines:
        parts.append(
            f"{work.engines} x {work.engine.tensor_parallel} generate {work.tokens_per_s:,.0f} "
            f"tokens/s ({work.request_per_s:.1f} for a request), answers expected to have up to "
            f"{work.answers_max} tokens"
        )
    rest = work.kind.cards - work.trainer_cards - work.engine_cards
    parts += [f"{rest} not used"] if rest else []
    return f"{work.kind.cards} x {work.kind.card.name}: {'; '.join(parts)}"


def _alike_line(plan: UnlikePlan) -> str:
    alike = plan.alike
    if alike is None:
        return "all treated alike, each as the weakest of them: does not fit"
    text = (
        f"all treated alike, each as the weakest of them: {alike.tokens_per_s:,.0f} tokens/s "
        f"({alike.trainer_cards} train), {plan.tokens_per_s / alike.tokens_per_s:.2f} times less"
    )
    every = sum(work.kind.price * work.kind.cards for work in plan.works)
    if not plan.per_hour:
        return text
    return f"{text}, {million_price(every, alike.tokens_per_s):,.3f} a million trained tokens"


def toml_files(plan: UnlikePlan, file: str) -> dict[str, str]:
    """Returns the files by file name, made from `file`."""
    return {
        machine_file.name(file): toml_text(kind_plan, machine_file, machine_file.name(file))
        for machine_file, kind_plan in machine_files(plan)
    }


def machine_files(plan: UnlikePlan) -> tuple[tuple[MachineFile, RunPlan], ...]:
    """Returns the machine files of each kind of machine, with the plan of its kind alone: for
    machines that train, the fastest kind first, and for those that generate. A kind with both has
    two files.
    """
    # They differ only in `devices`, the engine's size (`rollouts`) and `evaluation.enabled`, which
    # may differ from machine to machine.
    files: list[tuple[MachineFile, RunPlan]] = []
    usual = next(work.engine for work in plan.works if work.engine is not None and work.engines)
    for work in sorted(plan.works, key=lambda kind_work: -kind_work.trainer_cards):
        training = -(-work.trainer_cards // CARDS_PER_MACHINE)
        there = min(work.kind.cards, CARDS_PER_MACHINE)
        if training:
            first = min(work.trainer_cards, there)
            engine = work.engine if first < there else None
            cards = {"trainer": first, "rollouts": there - first if engine is not None else 0}
            files.append(_file(plan, work, engine or usual, cards, training))
        rest = work.kind.cards - training * CARDS_PER_MACHINE
        if work.engine is not None and work.engines and rest > 0:
            machines = -(-rest // CARDS_PER_MACHINE)
            cards = {"trainer": 0, "rollouts": min(rest, CARDS_PER_MACHINE)}
            files.append(_file(plan, work, work.engine, cards, machines))
    # A run has one evaluation, which shares the cards of a rollout.
    first = next(file for file, _ in files if file.generates)
    for file, _ in files:
        if file is not first:
            file.settings["evaluation"]["enabled"] = False
    return tuple(files)


def _file(
    plan: UnlikePlan, work: KindWork, engine: EngineSize, cards: dict[str, int], machines: int
) -> tuple[MachineFile, RunPlan]:
    layout = CardLayout(
        form=plan.form, trainer_cards=plan.trainer_cards, engines=work.engines, engine=engine
    )
    request = replace(plan.request, card=work.kind.card)
    settings = run_settings(request, layout)
    settings["devices"] = {role: count for role, count in cards.items() if count}
    settings["rollouts"]["count"] = max(1, cards["rollouts"] // engine.tensor_parallel)
    settings["trainer"]["processes"] = cards["trainer"] or settings["trainer"]["processes"]
    kind_request: PlanRequest = replace(request, cards=work.kind.cards)
    kind = "trainer" if cards["trainer"] else "rollouts"
    file = MachineFile(
        kind=kind,
        machines=machines,
        ranks=plan.trainer_cards,
        settings=settings,
        card=work.kind.card.name,
    )
    return file, RunPlan(kind_request, layout)
