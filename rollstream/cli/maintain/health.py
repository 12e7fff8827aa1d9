"""`rollstream health --port N`: asks a process of this machine for its health by HTTP (`/healthz`)
and returns it as an exit code, for the health check of a container.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request

from rollstream.cli.arguments import CommandParser

WAIT_S = 4.0  # a process that does not answer for so long counts as unreachable


def add_arguments(command: CommandParser) -> None:
    command.add_examples("--port 9464")
    command.add_argument(
        "--port",
        metavar="N",
        type=int,
        default=9464,
        help="the process's metrics port (default 9464)",
    )
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Print the process's state (`starting`, `running`, `stopping` or `stalled`), or with `--json`
    its whole answer. Exit code 1 for a stalled or unreachable process, else 0.
    """
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
