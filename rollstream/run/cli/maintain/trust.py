"""`rollstream trust RUN`: remembers, for this user on this machine, which code a run begun
elsewhere may import, where its links may lead, and which hosts get the user's credentials
(SECURITY.md). Nothing is written into the run.
"""

import argparse
import json
import os
from pathlib import Path

from rollstream.errors import ConfigurationError
from rollstream.look.query.locate import RunLocation, locate_run
from rollstream.look.query.own_runs import OwnRun, code_names, own_run, remember_run, remember_urls
from rollstream.private_state import state_folder
from rollstream.run.cli.arguments import RUN_OR_ARCHIVE_HELP, CommandParser


def add_arguments(command: CommandParser) -> None:
    command.add_examples("runs/quickstart-0", "runs/quickstart-0 --json")
    command.add_run(RUN_OR_ARCHIVE_HELP, with_trust=False)
    help = "folder to which links of the run, or its log or store, may lead; repeatable"
    command.add_argument("--folder", metavar="DIR", action="append", default=[], help=help)
    help = "HOST:PORT of a broker or store that receives your credentials, over TLS; repeatable"
    command.add_argument("--host", metavar="HOST", action="append", default=[], help=help)
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Remembers, without folders and hosts, the code that the run names."""
    location = locate_run(arguments.run)
    for host in arguments.host:
        if not host.rpartition(":")[2].isdecimal() or not host.rpartition(":")[0]:
            raise ConfigurationError(f"--host {host!r}: write HOST:PORT")
    folders = [_folder(path) for path in arguments.folder]
    is_stored = remember_urls(arguments.host)
    if folders or not arguments.host:
        names = () if folders else sorted(code_names(location.configuration))
        is_stored = remember_run(_id(location), names, folders) and is_stored
    if not is_stored:
        raise ConfigurationError(
            f"{state_folder()} cannot be written; name another folder in ROLLSTREAM_STATE"
        )
    allowed = own_run(location.key)
    if arguments.json:
        line = {"code": allowed.code, "folders": allowed.folders, "hosts": arguments.host}
        print(json.dumps({"run": location.run, **line}))
    else:
        _print(location, allowed, arguments.host)
    return 0


def _folder(path: str) -> str:
    folder = Path(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise ConfigurationError(f"--folder {path}: there is no such folder")
    return str(folder)


def _id(location: RunLocation) -> str:
    if not location.key:
        raise ConfigurationError(
            f"{location.name} has no id (no run.json in its store that can be read), by which it "
            "could be known; give --trust with each command, or copy what its links lead to"
        )
    return location.key


def _print(location: RunLocation, allowed: OwnRun, hosts: list[str]) -> None:
    print(f"{location.name}, when you look at it,")
    print(f"  may import: {', '.join(allowed.code) or 'no code of its own'}")
    print(f"  may follow links into: {', '.join(allowed.folders) or 'no other folder'}")
    if hosts:
        print(f"your credentials are sent, over TLS, to {', '.join(hosts)}")
