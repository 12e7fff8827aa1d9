"""`rollstream explore RUN [RUN …]`: opens runs in the browser, read-only, on 127.0.0.1; `--export
DIR` writes a folder for any file host. Beyond loopback (`--host`) a token is needed: that of
ROLLSTREAM_EXPLORER_TOKEN or a file, or one that is made and printed once.
"""

import argparse
import logging
import os
import signal
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from socket import gethostname, socket
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING

from rollstream.errors import ConfigurationError
from rollstream.look.query.locate import SIMULATION_FILE, RunLocation, locate_asked_run
from rollstream.run.cli.arguments import RUN_OR_ARCHIVE_HELP, CommandParser, whole_number_from
from rollstream.run.signals import warn
from rollstream.run.supervisor.process import end_with_parent
from rollstream.storage.archive.reading import allocate_tables_with_malloc
from rollstream.streams.foreign_text import PORT_MAX
from rollstream.temporary_folder import TemporaryFolder

if TYPE_CHECKING:
    from rollstream.look.explorer.serving.security import AccessRule

RUNS_MAX = 8
EVERY_ADDRESS = ("0.0.0.0", "::")
TERMINAL_BROWSERS = ("www-browser", "links", "elinks", "lynx", "w3m")
NICENESS = 15


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0",
        "runs/quickstart-0 runs/quickstart-1 --no-browser",
        "runs/quickstart-0 --export shared",
    )
    command.add_runs(
        f"{RUN_OR_ARCHIVE_HELP}; or a simulation: its TOML file, or what simulate --save wrote"
    )
    command.add_argument("--export", metavar="DIR", help="write static files instead of serving")
    number = whole_number_from(0, PORT_MAX)
    help = "port (default: 7461 or a free one)"
    command.add_argument("--port", metavar="N", type=number, help=help)
    help = "address to listen on (default 127.0.0.1); others need a token"
    command.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=help)
    help = "a further HOST:PORT or origin under which browsers reach the server; repeatable"
    command.add_argument("--allow-host", metavar="HOST", action="append", default=[], help=help)
    help = "file with the token (default: ROLLSTREAM_EXPLORER_TOKEN, else a new one is printed)"
    command.add_argument("--token-file", metavar="FILE", help=help)
    command.add_argument("--sql", action="store_true", help="let the page run SQL queries")
    command.add_argument("--no-browser", action="store_true", help="only print the URL")
    help = (
        f"lower the server's priority by N (default {NICENESS}: it takes only what training leaves)"
    )
    number = whole_number_from(0, 19)
    command.add_argument("--nice", metavar="N", type=number, default=NICENESS, help=help)
    command.add_archive_run()


def main(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C, or exports. Raises `ConfigurationError` for a run that does
    not exist.
    """
    end_with_parent()
    os.nice(arguments.nice)
    allocate_tables_with_malloc()
    logging.basicConfig(level=logging.WARNING, format="rollstream: %(message)s")
    if len(arguments.runs) > RUNS_MAX:
        raise ConfigurationError(f"{len(arguments.runs)} runs: at most {RUNS_MAX} are shown")
    signal.signal(signal.SIGTERM, _stop_export if arguments.export else _exit)
    with TemporaryFolder("explorer") as scratch:
        locations = _located(arguments, scratch)
        if arguments.export:
            from rollstream.look.explorer.serving.export import export

            print(f"exported: {export(locations, Path(arguments.export), warn)}")
        else:
            _serve(locations, arguments)
    return 0


def _located(arguments: argparse.Namespace, scratch: Path) -> list[RunLocation]:
    locations: list[RunLocation] = []
    for number, word in enumerate(arguments.runs):
        saved = None if word is None else _saved_simulation(Path(word))
        if word is None or (saved is None and not word.endswith(".toml")):
            locations.append(locate_asked_run(word, arguments.name, warn, arguments.is_trusted))
            continue
        # A simulation stands for its runs, whose steps are written below `scratch`.
        from rollstream.look.explorer.simulation import open_saved_runs, simulate_runs

        folder, room = scratch / str(number), RUNS_MAX - len(locations)
        room -= len(arguments.runs) - number - 1
        if saved is not None:
            locations += open_saved_runs(saved, folder, room, warn)
        else:
            locations += simulate_runs(word, folder, room, warn)
    return locations


def _saved_simulation(path: Path) -> Path | None:
    path = path / SIMULATION_FILE if path.is_dir() else path
    return path if path.name == SIMULATION_FILE and path.is_file() else None


def _serve(locations: list[RunLocation], arguments: argparse.Namespace) -> None:
    from rollstream.look.explorer.serving.events import EventHub
    from rollstream.look.explorer.serving.routes import Explorer
    from rollstream.look.explorer.serving.server import ExplorerServer

    rule, bound = _access(arguments)
    url = printed_url(rule, bound)
    hub = EventHub()
    with Explorer(locations, hub.publish, arguments.sql) as explorer, suppress(KeyboardInterrupt):

        def started() -> None:
            print(f"explorer: {url}", flush=True)
            if arguments.host in EVERY_ADDRESS:
                place = f"{gethostname()}, or another name or address of this machine"
                print(f"on other machines: the same with {place}", flush=True)
            if not arguments.no_browser and not rule.token:
                open_browser(url)

        ExplorerServer(explorer, hub, rule, started).run(bound)


def _access(arguments: argparse.Namespace) -> tuple["AccessRule", socket]:
    from rollstream.look.explorer.serving import security
    from rollstream.look.explorer.serving.address import bind

    token = security.read_token(arguments.token_file)
    if not token and not security.is_loopback(arguments.host):
        token = security.new_token()
    bound = bind(arguments.host, arguments.port)
    allowed = tuple(arguments.allow_host)
    return security.access_rule(arguments.host, bound.getsockname()[1], allowed, token), bound


def printed_url(rule: "AccessRule", bound: socket) -> str:
    """Returns the URL with the token if one is needed."""
    host, port = bound.getsockname()[:2]
    shown = "127.0.0.1" if host in EVERY_ADDRESS else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={rule.token}" if rule.token else "")


def open_browser(url: str) -> None:
    """Opens the browser without waiting for it."""
    with suppress(webbrowser.Error):
        browser = webbrowser.get()
        # w3m and the like would take the keys of this command.
        if Path(getattr(browser, "name", "")).name not in TERMINAL_BROWSERS:
            Thread(target=browser.open, args=(url,), daemon=True).start()


def _stop_export(number: int, frame: FrameType | None) -> None:
    # The export is not whole.
    sys.exit(128 + number)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
