"""`rollstream tune CONFIG [RUN] --gpus N`: proposes the settings with which a run trains fastest on
N GPUs, by simulation (docs/how-to/tune-a-run.md), from a profile or a recorded run.
"""

import argparse
import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rollstream.errors import ConfigurationError
from rollstream.look.monitor.format import plain_table
from rollstream.look.query.locate import run_path
from rollstream.os_failures import explain_os_error
from rollstream.plan.tuning.choices import (
    HELD,
    ChoiceSpace,
    TuningChoice,
    changed_settings,
    choice_of,
    choice_space,
    gpus_of,
)
from rollstream.plan.tuning.cores import SHARED_TOLERANCE
from rollstream.plan.tuning.proposed_toml import merged_tables, table_lines
from rollstream.plan.tuning.search import TOLERANCE, PredictedChoice, TuningProposal, propose
from rollstream.run.cli.arguments import RUN_OR_ARCHIVE_HELP, CommandParser, whole_number_from
from rollstream.run.cli.configuration import load_configuration
from rollstream.run.config.config import load_layers
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.run.console import TerminalConsole
from rollstream.run.signals import progress_line
from rollstream.whole_file import check_output

if TYPE_CHECKING:  # importing it takes seconds: it imports torch
    from rollstream.plan.tuning.machine import TuningMachine

GPUS_MAX = 10_000
# Choices in the table, besides the present one.
ROWS = 5
# Relative error of RUN's own prediction, above which proposals are in doubt.
CHECK_MAX = 0.2
# Simulated steps that are not counted: in them the run fills.
SKIP_MAX = 16
# "split" is the number of rollouts + the trainer's GPUs, "×" the speed relative to the present
# settings, "lag" the mean lag of the trained tokens, "idle" the idle shares of rollouts and
# trainer.
COLUMNS = (
    "", ">split", ">slots", ">max_lag", "on_update", ">repack", ">tokens/s", ">×", ">lag", ">idle",
)  # fmt: skip


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "examples/longtail.toml --gpus 5",
        "examples/quickstart.toml runs/quickstart-0 --gpus 4 --hold on_update",
        "examples/quickstart.toml runs/quickstart-0 --gpus 4 --toml tuned.toml --json",
    )
    command.add_configuration()
    help = RUN_OR_ARCHIVE_HELP.replace("newest run", "CONFIG's own, if CONFIG is a run")
    command.add_argument("recorded", metavar="RUN", nargs="?", help=help)
    help = "GPUs of rollouts and trainer together; CPU threads where both compute on the CPU"
    command.add_argument(
        "--gpus",
        metavar="N",
        type=whole_number_from(1, GPUS_MAX),
        required=True,
        help=help,
    )
    help = f"leave this as CONFIG has it ({', '.join(HELD)}); may be repeated"
    command.add_argument(
        "--hold", metavar="PART", action="append", default=[], choices=HELD, help=help
    )
    help = "largest max_lag that is proposed (default: CONFIG's own)"
    command.add_argument("--lag-max", metavar="N", type=int, help=help)
    help = "write the proposed configuration to this file; - prints it"
    command.add_argument("--toml", metavar="FILE", help=help)
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Raises `ConfigurationError` if speeds or lengths are unknown, or if no setting can run on
    these GPUs.
    """
    configuration, folder = load_configuration(arguments)
    _check_arguments(arguments)
    machine = _machine(arguments, configuration, folder)
    present = choice_of(configuration)
    space = choice_space(
        configuration,
        arguments.gpus,
        lag_max=arguments.lag_max,
        hold=frozenset(arguments.hold),
        has_drafts=machine.drafts is not None,
    )
    skip = min(SKIP_MAX, max(waves for _, waves in space.lags) + 1)
    proposal = propose(
        space,
        present,
        gpus_of(configuration, present) <= arguments.gpus,
        lambda choice: machine.predicted(choice, skip),
        lambda count: progress_line(f"{count} settings simulated"),
        TOLERANCE if machine.cores is None else SHARED_TOLERANCE,
    )
    progress_line("")
    if proposal is None:
        raise ConfigurationError(
            f"no settings on {arguments.gpus} GPUs can run: an answer of "
            f"{machine.workload.lengths.longest} tokens does not fit a rollout's KV cache, or its "
            "step never completes; shorten answers (sampling.tokens_max) or raise --lag-max"
        )
    changes = changed_settings(configuration, proposal.best.choice)
    if arguments.toml is not None:
        _write(arguments, changes)
    if arguments.json:
        print(json.dumps(_line(arguments.gpus, machine, proposal, changes)))
    elif arguments.toml != "-":
        _print(arguments, machine, proposal, changes, _beyond(machine, space, proposal.best, skip))
    return 0


def _check_arguments(arguments: argparse.Namespace) -> None:
    if arguments.lag_max is not None and not 0 <= arguments.lag_max <= 64:
        raise ConfigurationError(f"--lag-max must lie in [0, 64], got {arguments.lag_max}")
    if arguments.toml not in (None, "-"):
        with _named(arguments.toml):
            check_output(Path(arguments.toml))


@contextmanager
def _named(file: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"--toml {file}: {explain_os_error(error)}") from None


def _machine(
    arguments: argparse.Namespace, configuration: Configuration, folder: RunFolder
) -> "TuningMachine":
    from rollstream.plan.tuning.machine import machine_of
    from rollstream.plan.tuning.recorded import folders_of, read_engine, read_run

    path = Path(arguments.configuration)
    run_name = None if arguments.recorded is None else run_path(arguments.recorded)
    if run_name is None and (path.is_dir() or path.suffix == ".json"):
        run_name = str(path)
    run = None if run_name is None else read_run(run_name)
    profile = read_engine(configuration, folders_of(folder, run))
    measured = None if run is None else run.measured
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return machine_of(configuration, profile, measured, run and run.configuration, cores)


def _beyond(
    machine: "TuningMachine", space: ChoiceSpace, best: PredictedChoice, skip: int
) -> PredictedChoice | None:
    """The proposal with twice the lag bound if it has the largest allowed one; None if more cannot
    run.
    """
    lag = best.choice.max_lag
    if not lag or lag != max(waves for _, waves in space.lags) - 1 or len(space.lags) < 2:
        return None
    choice = replace(best.choice, max_lag=2 * lag, waves=2 * lag + 1)
    predicted = machine.predicted(choice, skip + lag)
    return None if predicted is None else PredictedChoice(choice, predicted)


def _line(
    gpus: int, machine: "TuningMachine", proposal: TuningProposal, changes: Mapping[str, Any]
) -> dict[str, Any]:
    rows = proposal.rows(ROWS)
    return {
        "gpus": gpus,
        "settings": dict(changes),
        "gain": proposal.gain,
        "present_fits": proposal.present_fits,
        "present": None if proposal.present is None else _figures(proposal.present),
        "proposed": _figures(proposal.best),
        "others": [_figures(prediction) for prediction in rows[1:]],
        "simulated": len({proposal.best, proposal.present, *proposal.others} - {None}),
        "assumed": list(machine.assumed),
        "unknown": list(machine.unknown),
        "predicted_over_recorded": machine.checked,
    }


def _figures(prediction: PredictedChoice) -> dict[str, Any]:
    return {**asdict(prediction.choice), **asdict(prediction.predicted)}


def _print(
    arguments: argparse.Namespace,
    machine: "TuningMachine",
    proposal: TuningProposal,
    changes: Mapping[str, Any],
    beyond: PredictedChoice | None,
) -> None:
    console = TerminalConsole()
    console.print(_table(proposal))
    lines = [_summary(arguments, proposal, changes)]
    if beyond is not None:
        more = beyond.predicted.tokens_per_s / proposal.best.predicted.tokens_per_s - 1
        lines.append(
            f"max_lag {beyond.choice.max_lag} would give {more:+.0%} tokens/s at a mean lag of "
            f"{beyond.predicted.lag_mean:.1f} (--lag-max {beyond.choice.max_lag})"
        )
    if changes:
        lines += [*table_lines(merged_tables({}, changes)), ""]
    if machine.checked is not None:
        lines.append(_accuracy_words(machine.checked))
    lines += [f"assumed: {text}" for text in machine.assumed]
    lines += [f"not known: {text}" for text in machine.unknown]
    console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


def _summary(
    arguments: argparse.Namespace, proposal: TuningProposal, changes: Mapping[str, Any]
) -> str:
    if not changes:
        return "the present settings are the best found, or as good"
    if proposal.gain is None:
        return "the present settings cannot run here; change:"
    if not proposal.present_fits:
        return (
            f"the present settings take more than {arguments.gpus} GPUs, or more lag than "
            f"--lag-max; {proposal.gain:+.0%} tokens/s by these:"
        )
    return f"{proposal.gain:+.0%} tokens/s by these settings:"


def _accuracy_words(checked: float) -> str:
    text = f"checked: for the settings of RUN the simulator predicts {checked:.2f} of its speed"
    if abs(checked - 1) > CHECK_MAX:
        text += (
            "; so it misses something of this machine: try a proposal for a few steps before you "
            "rely on it, and record a longer run"
        )
    return text


def _table(proposal: TuningProposal) -> Table:
    rows = [
        ("best" if n == 0 else "", prediction) for n, prediction in enumerate(proposal.rows(ROWS))
    ]
    if proposal.present is not None and proposal.present.choice != proposal.best.choice:
        rows.append(("now", proposal.present))
    has_drafts = len({prediction.choice.drafts for _, prediction in rows}) > 1
    table = plain_table(*COLUMNS, *(["drafts"] if has_drafts else []))
    for label, prediction in rows:
        drafts = ["on" if prediction.choice.drafts else "off"] if has_drafts else []
        table.add_row(
            label, *_cells(prediction.choice), *_speeds(prediction, proposal.present), *drafts
        )
    return table


def _cells(choice: TuningChoice) -> Sequence[str]:
    every_s, bound = choice.repack_every_s, choice.max_lag
    return (
        f"{choice.rollouts}+{choice.trainer_gpus}",
        str(choice.slots),
        f"none:{choice.waves}" if bound is None else str(bound),
        choice.on_update,
        "off" if every_s is None else f"{every_s:g} s",
    )


def _speeds(prediction: PredictedChoice, present: PredictedChoice | None) -> Sequence[str]:
    at = prediction.predicted
    times = 0.0 if present is None else present.predicted.tokens_per_s
    return (
        f"{at.tokens_per_s:,.0f}",
        f"{at.tokens_per_s / times:.2f}" if times else "",
        f"{at.lag_mean:.1f}",
        f"{max(0.0, at.idle_share):.0%} {max(0.0, at.trainer_idle_share):.0%}",
    )


def _write(arguments: argparse.Namespace, changes: Mapping[str, Any]) -> None:
    path = Path(arguments.configuration)
    layers = load_layers(path / "config.json" if path.is_dir() else path, arguments.overrides)
    values = {key: value for key, value in layers.values.items() if key != "folder"}
    head = f"# {arguments.configuration}, tuned for {arguments.gpus} GPUs by simulation"
    text = "\n".join([head, *table_lines(merged_tables(values, changes))]) + "\n"
    if arguments.toml == "-":
        print(text, end="")
        return
    with _named(arguments.toml):
        Path(arguments.toml).write_text(text, encoding="utf-8")
