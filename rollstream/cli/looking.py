"""Parsers of the commands that monitor and compare runs: report, diff, health, forward, top."""

from rollstream.cli.parts import Subcommands, add_command, add_json


def add_monitor_commands(commands: Subcommands) -> None:
    """Add `report`, `diff`, `health`, `forward` and `top`."""
    _add_report(commands)
    _add_diff(commands)
    _add_health(commands)
    _add_forward(commands)
    _add_top(commands)


def _add_report(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "report",
        "report",
        "write RUN/report.html and print a summary; several runs share one page",
        "runs/quickstart-0",
        "runs/quickstart-0 --json",
        "runs/quickstart-0 runs/quickstart-1 --output both.html",
    )
    command.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a running or finished run"
    )
    command.add_argument(
        "--output",
        metavar="FILE",
        help="output file (default RUN/report.html; ./report.html for several runs)",
    )
    add_json(command)


def _add_diff(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "diff",
        "diff",
        "compare two runs: settings, outcomes, curves, state hashes",
        "runs/quickstart-0 runs/quickstart-1",
        "runs/quickstart-0 runs/quickstart-1 --json",
    )
    command.add_argument("first", metavar="A", help="folder of the first run")
    command.add_argument("second", metavar="B", help="folder of the second run")
    add_json(command)


def _add_forward(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "forward",
        "forward",
        "send a run's metrics files to TensorBoard or Weights & Biases; resumes where it stopped",
        "runs/quickstart-0 --to tensorboard",
        "runs/quickstart-0 --to wandb --follow",
    )
    command.add_argument("run", metavar="RUN", help="folder of a running or finished run")
    command.add_argument("--to", required=True, choices=("tensorboard", "wandb"), help="target")
    command.add_argument("--follow", action="store_true", help="keep forwarding until Ctrl-C")
    add_json(command)


def _add_top(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "top",
        "top",
        "watch a running or finished run: rates, lag, queues, versions, warnings; q quits",
        "runs/quickstart-0",
        "runs/quickstart-0 --once",
        "runs/quickstart-0/config.json --json --every 5",
    )
    command.add_argument("run", metavar="RUN", help="the run's folder, or its config.json")
    command.add_argument("--once", action="store_true", help="print one frame and exit")
    command.add_argument(
        "--every", metavar="SECONDS", type=float, default=1.0, help="refresh interval (default 1)"
    )
    add_json(command)


def _add_health(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "health",
        "health",
        "check a process on this machine; exit code 1 if it is stalled or does not answer",
        "--port 9464",
    )
    command.add_argument(
        "--port",
        metavar="N",
        type=int,
        default=9464,
        help="the process's metrics port (default 9464)",
    )
    add_json(command)
