"""`rollstream report RUN`: `report.html` and a summary, from log and metrics files alone."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from rollstream.config import load
from rollstream.folder import RunFolder, bus_url
from rollstream.report.reading import read_history
from rollstream.report.summary import summarise
from rollstream.report.write import write_report
from streams.connect import open_bus
from streams.errors import ConfigurationError
from streams.topics import catalogue


def main(arguments: argparse.Namespace) -> int:
    """Of a run that is finished, stopped, or running now."""
    folder = RunFolder(Path(arguments.run).absolute())
    if not folder.configuration.exists():
        raise ConfigurationError(f"{folder.path} holds no run (no config.json there)")
    configuration = load(folder.configuration)
    bus = open_bus(bus_url(configuration, folder.path), sync=configuration.sync)
    try:
        bus.create(catalogue())  # a run that was only prepared has no topics yet
        history = read_history(bus, folder)
    finally:
        bus.close()
    summary = summarise(history)
    output = Path(arguments.output) if arguments.output else folder.report
    write_report(history, summary, output)
    if arguments.json:
        print(json.dumps(summary.line()))
    else:
        console = Console()
        console.print(summary.table())
        console.print(f"report: {output}", soft_wrap=True, highlight=False)
    return 0
