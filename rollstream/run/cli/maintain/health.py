"""`rollstream health --port N`: a process's health (`/healthz`) as an exit code, for a container;
`--sandbox CONFIG`: whether this machine can confine the output of a model.
"""

import argparse
import json
import sys
import urllib.error
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import cast

from rollstream.http_proxies import open_direct
from rollstream.os_failures import explain_os_error
from rollstream.run.cli.arguments import CommandParser, whole_number_from
from rollstream.streams.foreign_text import PORT_MAX

# More than a process answers; another program's answer may have no end.
BODY_BYTES = 1 << 16
# A process that does not answer for so long counts as unreachable.
WAIT_S = 4.0


def add_arguments(command: CommandParser) -> None:
    command.add_examples("--port 9464", "--sandbox examples/quickstart.toml")
    command.add_argument(
        "--port",
        metavar="N",
        type=whole_number_from(1, PORT_MAX),
        default=9464,
        help="the process's metrics port (default 9464)",
    )
    command.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="the process's metrics.host, if that is one address of a machine (default 127.0.0.1)",
    )
    command.add_argument(
        "--sandbox",
        metavar="CONFIG",
        help="instead, make a sandbox as `[task.sandbox]` of this configuration says, and print "
        "what holds each of its bounds on this machine",
    )
    help = "import the code that a run's CONFIG names, although you did not begin the run here"
    command.add_argument("--trust", action="store_true", dest="is_trusted", help=help)
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Prints the state (`starting`, `running`, `stopping` or `stalled`). Returns 1 for a stalled or
    unreachable process, also if another program answers, else 0. A sandbox that this machine cannot
    provide is a `ConfigurationError`.
    """
    if arguments.sandbox is not None:
        return _report_sandbox(arguments.sandbox, arguments.is_trusted, arguments.json)
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url = f"http://{host}:{arguments.port}/healthz"
    try:
        with open_direct(url, WAIT_S) as answer:
            body, status = answer.read(BODY_BYTES), answer.status
    except urllib.error.HTTPError as refusal:
        body, status = refusal.read(BODY_BYTES), refusal.code
    # The port's program may speak another protocol.
    except (OSError, HTTPException) as error:
        # Of an `URLError`.
        cause = getattr(error, "reason", error)
        why = explain_os_error(cause) if isinstance(cause, OSError) else cause
        print(f"rollstream: no answer from {url} ({why})", file=sys.stderr)
        return 1
    state = _state(body)
    if state is None:
        print(
            f"rollstream: another program answers at {url} (status {status}); --host and --port "
            "must be those of the metrics of a process of Rollstream, which its log names",
            file=sys.stderr,
        )
        return 1
    print(body.decode(errors="replace") if arguments.json else state)
    return int(status >= HTTPStatus.BAD_REQUEST)


def _state(body: bytes) -> str | None:
    """Returns None in another program's answer."""
    try:
        answer = json.loads(body)
    # No JSON, or no UTF-8.
    except ValueError:
        return None
    if not isinstance(answer, dict) or not {"run", "role", "state"} <= answer.keys():
        return None
    return str(cast("dict[str, object]", answer)["state"])


def _report_sandbox(configuration: str, is_trusted: bool, is_json: bool) -> int:
    from rollstream.look.query.locate import locate_run
    from rollstream.look.query.looking import require_code
    from rollstream.look.query.own_runs import code_names
    from rollstream.producers.sandbox.factory import plan_of, sandbox_report
    from rollstream.producers.tasks.base import PlainSandbox
    from rollstream.run.config.config import load

    path = Path(configuration)
    settings = load(path).task.sandbox
    if path.suffix == ".json" and code_names({"sandbox": {"backend": settings.backend}}):
        require_code(locate_run(configuration, is_trusted), "task")
    report = sandbox_report(plan_of(PlainSandbox(**settings.model_dump())))
    if is_json:
        print(json.dumps(report))
    else:
        for name, holder in report.items():
            print(f"{name:<14}{holder}")
    return 0
