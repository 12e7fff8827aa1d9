"""`rollstream plan MODEL --gpus 8xH100`: memory, traffic and speed of a run by arithmetic on the
model's configuration (docs/explanation/sizes.md), and a configuration, with the cheapest change
that fits. Exit code 1: it does not fit as asked.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from rollstream.errors import ConfigurationError
from rollstream.os_failures import explain_os_error
from rollstream.plan import proposal, unlike_proposal
from rollstream.plan.engines import GROUPS, SAMPLES, PlanRequest, usable
from rollstream.plan.planner import RunPlan, plan_run
from rollstream.plan.proposed_files import toml_files
from rollstream.plan.unlike import plan_unlike
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.console import TerminalConsole
from rollstream.run.sizes.arithmetic import MemoryLine, total
from rollstream.run.sizes.devices import ACCELERATORS, CARDS_PER_MACHINE, GB, CardKind, parse_kinds
from rollstream.run.sizes.shapes import find_shape

# Default of --context.
CONTEXT = 4096
# The run does not fit as asked.
EXIT_SHORT = 1
# The file name in printed commands.
PRINTED = "plan.toml"


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "qwen2.5-7b --gpus 8xH100",
        "qwen2.5-1.5b --gpus 1x24GB --lora 16 --toml plan.toml",
        "llama-3.1-405b --gpus 1024xH200 --store-gbps 400 --json",
        "qwen2.5-7b --gpus 8xH100@2.5,16xL40S@0.9 --best price",
    )
    help = (
        "a checkpoint's folder, a Hub name in this machine's cache, or a usual model (qwen2.5-7b)"
    )
    command.add_argument("model", metavar="MODEL", help=help)
    help = (
        "number and kind of all cards, as 8xH100 or 2x24GB; several kinds with commas, each with "
        "the price of a card for an hour if known: 8xH100@2.5,16xL40S@0.9"
    )
    command.add_argument("--gpus", metavar="NxCARD[@PRICE],…", required=True, help=help)
    help = (
        "with several kinds: what the plan maximises, trained tokens per second (default) or per "
        "price"
    )
    command.add_argument("--best", choices=["speed", "price"], default="speed", help=help)
    help = f"tokens of the longest sequence, prompt included (default {CONTEXT} or all positions)"
    command.add_argument("--context", metavar="N", type=int, help=help)
    help = f"groups of a step, of {SAMPLES} trajectories each (default {GROUPS})"
    command.add_argument("--groups", metavar="N", type=int, default=GROUPS, help=help)
    help = "train a LoRA adapter of this rank in place of all parameters"
    command.add_argument("--lora", metavar="RANK", type=int, default=0, help=help)
    help = "keep a reference policy for a KL term beside the trained model, on one training GPU"
    command.add_argument("--reference", action="store_true", help=help)
    help = "train a critic of the model's size too (the preset ppo), on one training GPU"
    command.add_argument("--critic", action="store_true", help=help)
    help = "Gbit/s of the object store (default 10)"
    command.add_argument("--store-gbps", metavar="G", type=float, default=10.0, help=help)
    help = "Gbit/s between two machines (default 100)"
    command.add_argument("--network-gbps", metavar="G", type=float, default=100.0, help=help)
    help = (
        "write the proposed configuration to this file, or with several machines to one for each "
        "kind of them (FILE-trainer.toml, FILE-rollouts.toml); - prints it"
    )
    command.add_argument("--toml", metavar="FILE", help=help)
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    kinds = parse_kinds(arguments.gpus)
    kind, *others = kinds
    if others:
        return _plan_kinds(arguments, kinds)
    plan = plan_run(_request(arguments, kind))
    proposed = plan.proposed
    if arguments.toml is not None and proposed is not None:
        _write(arguments.toml, lambda file: toml_files(proposed, file))
    if arguments.json:
        print(json.dumps(proposal.figures(plan)))
    elif arguments.toml != "-":
        _print(plan, kind.price)
    return 0 if plan.layout is not None else EXIT_SHORT


def _plan_kinds(arguments: argparse.Namespace, kinds: Sequence[CardKind]) -> int:
    for kind in kinds:
        if not kind.card.flops:
            raise ConfigurationError(
                f"--gpus {arguments.gpus}: the speed of {kind.card.name} is unknown, so kinds "
                f"cannot be compared; name the cards: {', '.join(ACCELERATORS)}"
            )
        if arguments.best == "price" and not kind.price:
            raise ConfigurationError(
                f"--best price: give the price of one {kind.card.name} for an hour, as "
                f"--gpus {kind.cards}x{kind.card.name}@1.5"
            )
    request = _request(arguments, kinds[0])
    plan = plan_unlike(request, kinds, arguments.best)
    if plan is None:
        cards = ", ".join(f"{kind.cards} x {kind.card.name}" for kind in kinds)
        text = f"no assignment of {cards} holds both trainer and rollouts"
        print(json.dumps({"fits": False, "reason": text}) if arguments.json else text)
        return EXIT_SHORT
    if arguments.toml is not None:
        _write(arguments.toml, lambda file: unlike_proposal.toml_files(plan, file))
    if arguments.json:
        print(json.dumps(unlike_proposal.figures(plan)))
    elif arguments.toml != "-":
        shape = plan.request.shape
        console = TerminalConsole()
        console.print(
            f"{shape.name}: {shape.parameters / GB:.3f} billion parameters, context "
            f"{request.context}",
            highlight=False,
        )
        console.print(unlike_proposal.account(plan), highlight=False, soft_wrap=True)
    return 0


def _request(arguments: argparse.Namespace, kind: CardKind) -> PlanRequest:
    shape = find_shape(arguments.model)
    if shape.experts is not None:
        raise ConfigurationError(
            f"{shape.name} is a mixture of {shape.experts.count} experts, and no plan counts what "
            "its training needs: the experts that a batch uses decide memory and time; plan a "
            "dense model"
        )
    for option, value in (
        ("--store-gbps", arguments.store_gbps),
        ("--network-gbps", arguments.network_gbps),
    ):
        if not 0 < value < float("inf"):
            raise ConfigurationError(f"{option} must be > 0, got {value:g}")
    if arguments.context is None:
        arguments.context = min(CONTEXT, shape.positions)
    if not 2 <= arguments.context <= shape.positions:
        raise ConfigurationError(
            f"--context must lie in [2, {shape.positions}], the positions of {shape.name}, "
            f"got {arguments.context}"
        )
    if arguments.groups < 1:
        raise ConfigurationError(f"--groups must be ≥ 1, got {arguments.groups}")
    if arguments.lora < 0:
        raise ConfigurationError(f"--lora must be ≥ 0, got {arguments.lora}")
    return PlanRequest(
        shape=shape,
        card=kind.card,
        cards=kind.cards,
        context=arguments.context,
        store_gbps=arguments.store_gbps,
        network_gbps=arguments.network_gbps,
        lora_rank=arguments.lora,
        groups=arguments.groups,
        reference=arguments.reference,
        critic=arguments.critic,
    )


def _write(file: str, texts: Callable[[str], Mapping[str, str]]) -> None:
    if file == "-":
        print("\n".join(texts(PRINTED).values()), end="")
        return
    for name, text in texts(file).items():
        try:
            Path(name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--toml {name}: {explain_os_error(error)}") from None


def _print(plan: RunPlan, price: float) -> None:
    console = TerminalConsole()
    request, proposed = plan.request, plan.proposed
    shape = request.shape
    active = "" if shape.experts is None else f", {shape.active_parameters / GB:.1f} active"
    console.print(
        f"{shape.name}: {shape.parameters / GB:.3f} billion parameters{active}; "
        f"{request.cards} x {request.card.name}, context {request.context}",
        highlight=False,
    )
    if plan.layout is None:
        console.print(f"does not fit: {proposal.shortage_text(plan)}", highlight=False)
    if proposed is None:
        return
    if plan.layout is None:
        console.print("with that change:", highlight=False)
    layout = proposed.layout
    assert layout is not None
    console.print(_memory_table(proposed))
    console.print(_link_table(proposed))
    console.print(_account(proposed), highlight=False, soft_wrap=True)
    if price and layout.tokens_per_s:
        per_hour = price * proposed.request.cards
        million = unlike_proposal.million_price(per_hour, layout.tokens_per_s)
        console.print(
            f"price: {per_hour:,.2f} an hour, {million:,.3f} a million trained tokens",
            highlight=False,
        )


def _memory_table(plan: RunPlan) -> Table:
    assert plan.layout is not None
    title = (
        f"memory, GB: {plan.layout.trainer_cards} training, "
        f"{plan.layout.engines} x {plan.layout.engine.tensor_parallel} generating"
    )
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("GB", justify="right")
    card = plan.request.card
    parts: Sequence[tuple[str, tuple[MemoryLine, ...], float]] = (
        ("trainer, one card", proposal.trainer_lines(plan), usable(card)),
        ("trainer, host memory of one rank", proposal.host_lines(plan), 0.0),
        (
            "rollout, one card",
            proposal.rollout_lines(plan),
            card.memory * plan.layout.engine.memory_share,
        ),
    )
    for title, lines, available in parts:
        of = f" of {available / GB:.1f}" if available else ""
        table.add_row(title, f"{total(lines) / GB:.1f}{of}", style="bold")
        for line in lines:
            if line.bytes:
                table.add_row(f"  {line.what}", f"{line.bytes / GB:.2f}")
    return table


def _link_table(plan: RunPlan) -> Table:
    title = (
        f"seconds per version: store {plan.request.store_gbps:g} Gbit/s, machines "
        f"{plan.request.network_gbps:g} Gbit/s"
    )
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    columns = ("form", "GB", "publish", "fetch", "relay", "load")
    for name in columns:
        table.add_column(name, justify="left" if name == "form" else "right")
    sizes = proposal.figures(plan)["version_bytes"]
    for kind, seconds in proposal.transfer_seconds(plan).items():
        times = (f"{seconds[name]:.3g}" for name in columns[2:])
        table.add_row(kind, f"{sizes[kind] / GB:.3g}", *times)
    return table


def _account(plan: RunPlan) -> str:
    figures, layout, request = proposal.figures(plan), plan.layout, plan.request
    assert layout is not None
    lines = [
        f"micro-batch: {layout.form.micro_batch_tokens} tokens (largest that fits: "
        f"{layout.micro_batch_max}), layers "
        f"{'recomputed' if layout.form.recompute else 'kept'}",
        f"KV cache of an engine: {layout.engine.kv_tokens} tokens, {figures['kv_slots']} longest "
        f"sequences; {layout.engine.slots} slots",
    ]
    if layout.engine.reason:
        lines.append(f"engine torch: {layout.engine.reason}")
    if layout.tokens_per_s:
        lines.append(
            f"tokens/s: training {layout.train_tokens_per_s:,.0f}, generating "
            f"{layout.rollout_tokens_per_s:,.0f}; a step of {request.trajectories} trajectories "
            f"takes {request.step_tokens / layout.tokens_per_s:,.1f} s"
        )
        spent = figures["round_seconds"]
        if layout.form.ranks > CARDS_PER_MACHINE and spent["collectives"] > spent["compute"]:
            lines.append(
                f"training waits for the network between machines: a round computes "
                f"{spent['compute']:,.1f} s and moves layers for {spent['collectives']:,.1f} s "
                "(--network-gbps)"
            )
        lines.append(
            f"log {figures['log_bytes_per_day'] / GB:.1f} GB and archive "
            f"{figures['archive_bytes_per_day'] / GB:.1f} GB a day"
        )
    for file in figures["files"] if request.machines > 1 else ():
        lines.append(f"{file['kind']} on {file['machines']} of {request.machines} machines:")
        lines += [f"  {command}" for command in file["commands"]]
    lines.append("the proposed configuration: --toml -")
    return "\n".join(lines)
