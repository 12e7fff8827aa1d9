"""`python -m benchmarks [NAME …] [--quick] [--json]`: measures the promises. `--list` prints each
case with its file and its goal.

A NAME is a module with `cases(quick) -> Iterator[Case]` (`catalogue.py`). Without names all of them
run, except those that need an installation of their own. Each case is printed as soon as it is
measured, whether its goal is met or not, and its figures are kept in `benchmarks/results/`, from
which the tables of README and docs are made. The exit status is 0 when every case was measured.
"""

import argparse
import importlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.case import Case
from benchmarks.catalogue import BENCHMARKS, BY_NAME_ONLY, lines
from benchmarks.last_runs import FOLDER, case_json, keep, present
from benchmarks.result_tables import readme_names
from testbed.servers.guard import guard

COLUMNS = "{:<26} {:>12} {:<12} {:>12} {:>7} {:>6} {:<4} {}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what the project promises.",
        epilog="example: python -m benchmarks bus engine --quick",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(BENCHMARKS)}")
    parser.add_argument(
        "--list", action="store_true", help="print case, file and goal, measure nothing"
    )
    parser.add_argument("--quick", action="store_true", help="smaller and noisier, nothing is kept")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--readme", action="store_true", help="the names whose cases README's table has"
    )
    parser.add_argument(
        "--results", type=Path, default=FOLDER, metavar="DIR", help="keeps the figures there"
    )
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    if chosen.list:
        print("\n".join(lines()))
        return
    names = readme_names() if chosen.readme else [n for n in BENCHMARKS if n not in BY_NAME_ONLY]
    guard()
    if not chosen.json:
        titles = ("case", "value", "unit", "reference", "ratio", "goal", "met", "note")
        print(COLUMNS.format(*titles))
    for name in chosen.names or names:
        measured = present()
        module = importlib.import_module(BENCHMARKS[name].module)
        for case in module.cases(chosen.quick):
            print(json.dumps(case_json(case)) if chosen.json else _row(case), flush=True)
            if not BENCHMARKS[name].lists(case.case):
                print(f"{case.case} is missing in benchmarks/catalogue.py", file=sys.stderr)
            elif not chosen.quick:
                keep(name, case, measured, chosen.results)
    if not chosen.quick:
        print("README and docs: python -m testbed.reference_pages", file=sys.stderr)


def _row(case: Case) -> str:
    met = "" if case.met is None else "yes" if case.met else "NO"
    note = f"against {case.reference}; {case.note}" if case.reference else case.note
    return COLUMNS.format(
        case.case,
        _number(case.value),
        case.unit,
        _number(case.reference_value),
        "" if case.ratio is None else f"{case.ratio:.2f}",
        "" if case.goal is None else f"{case.goal:g}",
        met,
        note,
    ).rstrip()


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
