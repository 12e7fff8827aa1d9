"""`rollstream simulate CONFIG`: the speeds of scheduling policies, published ones and ours, on GPU
clusters in virtual time (docs/explanation/simulator.md). CONFIG is a TOML file of its own kind
(`SimulationSettings`).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from rollstream.errors import ConfigurationError
from rollstream.look.explorer.serving.report_file import write_simulated
from rollstream.look.query.locate import SIMULATION_FILE
from rollstream.plan.simulation_settings import load_simulation
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.console import TerminalConsole
from rollstream.run.signals import progress_line
from rollstream.simulator.experiment import (
    PolicyRun,
    policy_names,
    run_policies,
)
from rollstream.simulator.saved_runs import save_runs

# The table: trained tokens per second, "×" their ratio to the first policy's, seconds per step,
# used share of the KV cache, idle share of the rollouts' time, lag of trained tokens (mean and
# largest), moves between rollouts, and the share of the GPUs that generate.
COLUMNS = ("policy", "tokens/s", "×", "step s", "KV", "idle", "lag", "moves", "share")


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "examples/cluster-1024.toml",
        "examples/cluster-1024.toml --set scale=8 --json",
        "examples/cluster-1024.toml --set 'policies=[\"laminar\"]' --html cluster.html",
        "examples/cluster-1024.toml --set scale=8 --save simulated",
    )
    command.add_argument(
        "configuration", metavar="CONFIG", help="TOML file (docs/explanation/simulator.md)"
    )
    command.add_overrides("override one setting, e.g. scale=8 or constants.train_mfu=0.4")
    command.add_argument("--html", metavar="FILE", help="write the timelines to this page")
    help = "write the results to DIR/simulation.json, which rollstream explore DIR opens"
    command.add_argument("--save", metavar="DIR", help=help)
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """A table for each cluster, or with `--json` a line for each policy on each cluster."""
    settings = load_simulation(Path(arguments.configuration), arguments.overrides)
    # Refused before the simulation, which takes long.
    page = None if arguments.html is None else _page(arguments.html)
    if arguments.save is not None and Path(arguments.save).is_file():
        raise ConfigurationError(f"--save {arguments.save}: it is a file; name a folder")
    console, runs = TerminalConsole(), list[PolicyRun]()
    total = len(policy_names(settings)) * len(settings.clusters)
    for run in run_policies(settings):
        runs.append(run)
        words = f"{len(runs)} of {total}: {run.cluster.model} {run.result.policy}"
        progress_line(words, "\n" if len(runs) == total else "")
        first = next(finished for finished in runs if finished.cluster == run.cluster)
        if arguments.json:
            print(json.dumps(line_of(run, first)), flush=True)
        elif len(runs) % len(policy_names(settings)) == 0:
            console.print(_table(runs[-len(policy_names(settings)) :], settings.scale))
    written = {} if page is None else {"timelines": page}
    if page is not None:
        write_simulated(runs, page)
    if arguments.save is not None:
        written["results"] = Path(arguments.save) / SIMULATION_FILE
        save_runs(runs, written["results"])
    if not arguments.json:
        for what, path in written.items():
            console.print(f"{what}: {path}", soft_wrap=True, highlight=False)
    return 0


def line_of(run: PolicyRun, first: PolicyRun) -> dict[str, object]:
    """`speed_up` is relative to `first`, the first policy on the same cluster."""
    return {
        "model": run.cluster.model,
        "gpus": run.cluster.gpus,
        "rollout_share": run.share,
        "speed_up": round(run.result.tokens_per_s / first.result.tokens_per_s, 4),
        **run.result.line(),
    }


def _table(runs: Sequence[PolicyRun], scale: int) -> Table:
    cluster = runs[0].cluster
    # Only 1/`scale` of the cluster's GPUs was simulated.
    part = f", 1/{scale} of it" if scale > 1 else ""
    title = f"{cluster.model} on {cluster.gpus} GPUs{part}, simulated"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for run in runs:
        result = run.result
        table.add_row(
            result.policy,
            f"{result.tokens_per_s:,.0f}",
            f"{result.tokens_per_s / runs[0].result.tokens_per_s:.2f}",
            f"{result.step_s:.1f}",
            f"{result.kv_utilisation:.0%}",
            f"{result.idle_share:.0%}",
            f"{result.lag_mean():.1f} ≤{result.lag_max()}",
            f"{result.counts.moves}",
            f"{run.share:g}",
        )
    return table


def _page(path: str) -> Path:
    page = Path(path)
    if page.is_dir() or not page.parent.is_dir():
        raise ConfigurationError(f"--html {path}: give a file in a folder that exists")
    return page
