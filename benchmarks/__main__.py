"""`python -m benchmarks [NAME …] [--quick] [--json]`: every measured promise is a case of some
module here.

A NAME is a module of a subfolder with `cases(quick) -> Iterator[Case]`; without names all of them
run. Each case is printed as soon as it is measured, also a bad one; the exit status is 0 when every
case was measured.
"""

import argparse
import dataclasses
import importlib
import json
from collections.abc import Sequence

from benchmarks.case import Case

MODULES = {
    "archive": "benchmarks.storage.archive",
    "asking": "benchmarks.analysis.asking",
    "audit": "benchmarks.analysis.audit",
    "bus": "benchmarks.streams.bus",
    "chaos": "benchmarks.chaos.chaos",
    "cloud": "benchmarks.pipeline.cloud",
    "delta": "benchmarks.weights.delta",
    "engine": "benchmarks.engine.engine",
    "histospec": "benchmarks.histospec.histospec",
    "hostile": "benchmarks.chaos.hostile",
    "kafka": "benchmarks.streams.kafka",
    "pipeline": "benchmarks.pipeline.pipeline",
    "planner": "benchmarks.repack.planner",
    "relay": "benchmarks.weights.relay",
    "repack": "benchmarks.repack.repack",
    "resume": "benchmarks.resume.resume",
    "s3": "benchmarks.storage.s3",
    "simulator": "benchmarks.simulator.simulator",
    "skew": "benchmarks.upgrade.skew",
    "weights": "benchmarks.weights.weights",
}
EXTRA = {"vllm": "benchmarks.vllm.vllm"}  # by name only: it needs `make vllm`
KNOWN = {**MODULES, **EXTRA}
COLUMNS = "{:<26} {:>12} {:<12} {:>12} {:>7} {:>6} {:<4} {}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what the project promises.",
        epilog="example: python -m benchmarks bus engine --quick",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(KNOWN)}")
    parser.add_argument("--quick", action="store_true", help="smaller and noisier")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.names) - set(KNOWN))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(KNOWN)}")
    if not chosen.json:
        titles = ("case", "value", "unit", "reference", "ratio", "goal", "met", "note")
        print(COLUMNS.format(*titles))
    for name in chosen.names or MODULES:
        module = importlib.import_module(KNOWN[name])
        for case in module.cases(chosen.quick):
            print(json.dumps(dataclasses.asdict(case)) if chosen.json else _row(case), flush=True)


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
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
