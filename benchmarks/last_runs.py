"""The last run of each case: value, goal, date, machine, load and commit, in `benchmarks/results/`
(a file per NAME, a line of JSON per case), which is committed.

`python -m benchmarks NAME` writes a case here as soon as it is measured; a quick run, whose figures
are rough, writes nothing. Every table of measured figures in README and docs is made from these
files (`result_tables.py`).
"""

import dataclasses
import datetime
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.case import Case
from benchmarks.catalogue import BENCHMARKS
from rollstream.revision import code_revision
from testbed.repository import ROOT

FOLDER = ROOT / "benchmarks" / "results"
_CASE_FIELDS = tuple(field.name for field in dataclasses.fields(Case))
_COMMIT_LETTERS = 9
_NO_CODE = (":!benchmarks/results", ":!*.md")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """When, where and on which code a case was measured. `load` is the machine's load average of a
    minute before the benchmark began, None where it was not recorded.
    """

    date: str
    machine: str
    load: float | None
    commit: str


@dataclass(frozen=True, slots=True)
class LastRun:
    """A measured case and its circumstances."""

    case: Case
    measured: Circumstances


def present() -> Circumstances:
    """Returns the circumstances of a benchmark that begins now. The commit ends with `+` where code
    differs from it; figures that were kept meanwhile, and pages, are no code.
    """
    commit, _, changes = code_revision().partition("+")
    return Circumstances(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=_machine(),
        load=round(os.getloadavg()[0], 1),
        commit=commit[:_COMMIT_LETTERS] + ("+" if changes and _is_code_changed() else ""),
    )


def read_runs(folder: Path = FOLDER) -> dict[str, LastRun]:
    """Returns the last run of each case, in the order of the catalogue; none of a case that the
    catalogue no longer has.
    """
    return {
        case: run
        for name in BENCHMARKS
        for case, run in _read(folder / f"{name}.jsonl").items()
        if BENCHMARKS[name].lists(case)
    }


def keep(name: str, case: Case, measured: Circumstances, folder: Path = FOLDER) -> None:
    """Replace the last run of a case of the benchmark `name`. The other cases keep theirs."""
    path = folder / f"{name}.jsonl"
    runs = {**_read(path), case.case: LastRun(case, measured)}
    listed = [one for one in runs if BENCHMARKS[name].lists(one)]
    listed.sort(key=lambda one: _place(name, one))
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(f"{_line(runs[one])}\n" for one in listed), encoding="utf-8")
    part.replace(path)


def case_json(case: Case) -> dict[str, Any]:
    """Returns the case as JSON: plain numbers where a benchmark computed with numpy, and null in
    place of NaN, which JSON does not have.
    """
    return {name: _plain(value) for name, value in dataclasses.asdict(case).items()}


def _plain(value: object) -> object:
    number: object = cast(Any, value).item() if isinstance(value, np.generic) else value
    return None if isinstance(number, float) and math.isnan(number) else number


def _read(path: Path) -> dict[str, LastRun]:
    if not path.exists():
        return {}
    runs = [_run(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {run.case.case: run for run in runs}


def _run(line: str) -> LastRun:
    found = cast(Mapping[str, Any], json.loads(line))
    fields = {name: found[name] for name in _CASE_FIELDS}
    if fields["value"] is None:
        fields["value"] = math.nan
    rest = {key: found[key] for key in ("date", "machine", "load", "commit")}
    return LastRun(Case(**fields), Circumstances(**rest))


def _line(run: LastRun) -> str:
    whole = case_json(run.case) | dataclasses.asdict(run.measured)
    return json.dumps(whole, ensure_ascii=False)


def _place(name: str, case: str) -> tuple[int, int, str]:
    """Returns where the catalogue has a case; a pattern has its cases by number, then by name."""
    patterns = [one for goals in BENCHMARKS[name].files.values() for one in goals]
    exact = [place for place, one in enumerate(patterns) if one == case]
    fitting = [place for place, one in enumerate(patterns) if fnmatchcase(case, one)]
    number = re.search(r"\d+$", case)
    return (exact or fitting)[0], int(number[0]) if number else 0, case


def _is_code_changed() -> bool:
    words = ["git", "-C", str(ROOT), "status", "--porcelain", "-uno", "--", "."]
    done = subprocess.run([*words, *_NO_CODE], capture_output=True, text=True, check=True)
    return bool(done.stdout)


def _machine() -> str:
    """Returns cores, memory, processor and cards, as a table shows them."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{os.cpu_count()} cores of {_processor()}, {memory_gb:.0f} GB, {_cards()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0].replace("(R)", "") if names else platform.machine()


def _cards() -> str:
    cards = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return f"{cards} GPUs" if cards else "no GPU"
