"""`rollstream health --port N`: asks a process of this machine for its health by HTTP (`/healthz`)
and returns it as an exit code, for the health check of a container. `--sandbox CONFIG` reports
instead whether this machine can confine what a model writes, and what holds each bound.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

from rollstream.cli.arguments import CommandParser

WAIT_S = 4.0  # a process that does not answer for so long counts as unreachable


def add_arguments(command: CommandParser) -> None:
    command.add_examples("--port 9464", "--sandbox examples/quickstart.toml")
    command.add_argument(
        "--port",
        metavar="N",
        type=int,
        default=9464,
        help="the process's metrics port (default 9464)",
    )
    command.add_argument(
        "--sandbox",
        metavar="CONFIG",
        help="instead, make a sandbox as `[task.sandbox]` of this configuration says, and print "
        "what holds each of its bounds on this machine",
    )
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Print the process's state (`starting`, `running`, `stopping` or `stalled`), or with `--json`
    its whole answer. Exit code 1 for a stalled or unreachable process, else 0. A sandbox that
    this machine cannot provide is a `ConfigurationError`.
    """
    if arguments.sandbox is not None:
        return _report_sandbox(arguments.sandbox, arguments.json)
    url = f"http://127.0.0.1:{arguments.port}/healthz"
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            body, code = answer.read(), 0
    except urllib.error.HTTPError as refusal:
        body, code = refusal.read(), 1
    except OSError as error:
        print(f"rollstream: no answer from {url} ({error})", file=sys.stderr)
        return 1
    print(body.decode() if arguments.json else json.loads(body)["state"])
    return code


def _report_sandbox(configuration: str, is_json: bool) -> int:
    """Print what holds each bound of a sandbox here, after one was made."""
    from rollstream.config.config import load
    from rollstream.producers.sandbox.factory import plan_of, sandbox_report
    from rollstream.producers.tasks.base import PlainSandbox

    settings = load(Path(configuration)).task.sandbox
    report = sandbox_report(plan_of(PlainSandbox(**settings.model_dump())))
    if is_json:
        print(json.dumps(report))
    else:
        for name, holder in report.items():
            print(f"{name:<14}{holder}")
    return 0
