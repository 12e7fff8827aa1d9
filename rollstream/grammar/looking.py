"""Commands that look at runs: report, top, diff, forward."""

from rollstream.grammar.parts import Commands, add, add_json


def add_looking(commands: Commands) -> None:
    """`report` and its neighbours."""
    _add_report(commands)
    _add_diff(commands)
    _add_health(commands)
    _add_forward(commands)
    _add_top(commands)


def _add_report(commands: Commands) -> None:
    command = add(
        commands,
        "report",
        "report",
        "write RUN/report.html and print a summary; several runs are laid over each other",
        "runs/quickstart-0",
        "runs/quickstart-0 --json",
        "runs/quickstart-0 runs/quickstart-1 --output both.html",
    )
    command.add_argument(
        "runs", metavar="RUN", nargs="+", help="a run's folder, finished or living"
    )
    command.add_argument(
        "--output",
        metavar="FILE",
        help="where to write (default RUN/report.html; ./report.html for several runs)",
    )
    add_json(command)


def _add_diff(commands: Commands) -> None:
    command = add(
        commands,
        "diff",
        "diff",
        "show how two runs differ: settings, outcomes, curves, states",
        "runs/quickstart-0 runs/quickstart-1",
        "runs/quickstart-0 runs/quickstart-1 --json",
    )
    command.add_argument("first", metavar="A", help="a run's folder")
    command.add_argument("second", metavar="B", help="another run's folder")
    add_json(command)


def _add_forward(commands: Commands) -> None:
    command = add(
        commands,
        "forward",
        "forward",
        "send a run's metrics files to TensorBoard or Weights & Biases; goes on where it ended",
        "runs/quickstart-0 --to tensorboard",
        "runs/quickstart-0 --to wandb --follow",
    )
    command.add_argument("run", metavar="RUN", help="the run's folder, finished or living")
    command.add_argument("--to", required=True, choices=("tensorboard", "wandb"), help="where to")
    command.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    add_json(command)


def _add_top(commands: Commands) -> None:
    command = add(
        commands,
        "top",
        "top",
        "watch a run, living or finished: rates, lag, queues, versions, warnings; q quits",
        "runs/quickstart-0",
        "runs/quickstart-0 --once",
        "runs/quickstart-0/config.json --json --every 5",
    )
    command.add_argument("run", metavar="RUN", help="the run's folder, or its config.json")
    command.add_argument("--once", action="store_true", help="print one frame and end")
    command.add_argument(
        "--every", metavar="SECONDS", type=float, default=1.0, help="between two looks (default 1)"
    )
    add_json(command)


def _add_health(commands: Commands) -> None:
    command = add(
        commands,
        "health",
        "health",
        "ask a process on this machine how it is; exit code 1 if it is stalled or does not answer",
        "--port 9464",
    )
    command.add_argument("--port", metavar="N", type=int, default=9464, help="its metrics port")
    add_json(command)
