"""`rollstream profile CONFIG`: measures the engine's decode steps over batch sizes and cached
tokens, and fits a roofline, from which rollouts take B_max and which `paced` imitates.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from rollstream.run.cli.arguments import EXAMPLE_RUN, CommandParser
from rollstream.run.cli.configuration import load_configuration
from rollstream.run.console import TerminalConsole
from rollstream.run.signals import progress_line

if TYPE_CHECKING:
    from rollstream.producers.engines.profile import EngineProfile, StepTiming


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        EXAMPLE_RUN, "examples/quickstart.toml --out profiles/quickstart.json --json"
    )
    command.add_configuration()
    command.add_argument(
        "--out", metavar="FILE", help="output (default: rollouts.profile, else in the run's folder)"
    )
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Writes the profile to `--out`, else `rollouts.profile`, else where rollouts look in the run's
    folder.
    """
    configuration, folder = load_configuration(arguments)
    from rollstream.producers.engines.profile import profile_path, write_profile

    # Imports torch: after validation.
    from rollstream.run.roles.rollout import measure_profile

    measured: list[StepTiming] = []

    def show_progress(point: "StepTiming") -> None:
        measured.append(point)
        progress_line(f"{len(measured)} batches measured")

    profile = measure_profile(configuration, folder.path, show_progress)
    progress_line("")
    default = profile_path(folder.path, profile.engine, profile.model)
    path = Path(arguments.out or configuration.rollouts.profile or default)
    write_profile(path, profile, is_typed=bool(arguments.out))
    if arguments.json:
        points = [asdict(point) for point in measured]
        print(json.dumps({"file": str(path), **asdict(profile), "measured": points}))
        return 0
    console = TerminalConsole()
    console.print(_table(measured, profile))
    console.print(_account(profile), highlight=False, soft_wrap=True)
    console.print(f"written: {path}", highlight=False, soft_wrap=True)
    return 0


def _table(measured: "list[StepTiming]", profile: "EngineProfile") -> Table:
    table = Table(title="one decode step")
    for column in ("rows", "KV tokens", "measured ms", "fitted ms", "error %"):
        table.add_column(column, justify="right")
    for point in measured:
        fitted_s = profile.roofline.step_s(point.rows, point.kv_tokens)
        table.add_row(
            f"{point.rows}",
            f"{point.kv_tokens:.0f}",
            f"{point.seconds * 1e3:.2f}",
            f"{fitted_s * 1e3:.2f}",
            f"{(fitted_s / point.seconds - 1) * 100:+.0f}",
        )
    return table


def _account(profile: "EngineProfile") -> str:
    r = profile.roofline
    how = "reading beside arithmetic" if r.overlapping else "reading, then arithmetic"
    return (
        f"{profile.engine}, model {profile.model}: {how}; weights {r.weights_s * 1e3:.3f} ms, "
        f"row {r.row_s * 1e3:.4f} ms, 1000 KV tokens {r.kv_token_s * 1e6:.4f} ms, "
        f"beside {r.overhead_s * 1e3:.3f} ms; 1000 prefilled tokens "
        f"{r.prefill_token_s * 1e6:.2f} ms\n"
        f"B_max = {profile.batch_max} of {profile.slots} slots; the fit is off by "
        f"{profile.error:.0%} (median), {profile.error_max:.0%} at most"
    )
