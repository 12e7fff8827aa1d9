"""The tables of measured figures in README and docs, from the last run of each case
(`last_runs.py`). `python -m testbed.reference_pages` writes them into the pages.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.case import Case
from benchmarks.catalogue import BENCHMARKS
from benchmarks.descriptions import DESCRIPTIONS
from benchmarks.last_runs import LastRun, read_runs

NOTE_LETTERS_MAX = 240  # of a cell; the file has the whole note
UNSAID = ("share", "ratio", "0/1")  # units that a table leaves out


@dataclass(frozen=True, slots=True)
class Shown:
    """The figures of a last run as text."""

    run: LastRun

    @property
    def case(self) -> Case:
        return self.run.case

    @property
    def value(self) -> str:
        goal = self.case.goal if self.case.ratio is None else None
        return number_text(self.case.value, goal)

    @property
    def ratio(self) -> str:
        return "" if self.case.ratio is None else number_text(self.case.ratio, self.case.goal)

    @property
    def goal(self) -> str:
        """The goal of today's catalogue, and whether it was missed."""
        goal = goal_text(self.case.case)
        if not goal:
            return ""
        verdict = {None: ", not decided", False: ", **missed**", True: ""}[self.case.met]
        return goal + verdict

    @property
    def value_with_unit(self) -> str:
        return self._with_unit(self.value)

    @property
    def reference(self) -> str:
        if self.case.reference is None:
            return ""
        if self.case.reference_value is None:
            return self.case.reference
        return f"{self.case.reference}: {self._with_unit(number_text(self.case.reference_value))}"

    @property
    def ratio_or_value(self) -> str:
        return f"{self.ratio} ×" if self.ratio else self.value_with_unit

    def _with_unit(self, number: str) -> str:
        unit = self.case.unit
        return number if not number or unit in UNSAID else f"{number} {unit}".rstrip()

    @property
    def note(self) -> str:
        note = self.case.note.replace("|", "\\|")
        if len(note) <= NOTE_LETTERS_MAX:
            return note
        return f"{note[:NOTE_LETTERS_MAX].rpartition(' ')[0].rstrip(',;:')} …"


@dataclass(frozen=True, slots=True)
class ReadmeRow:
    """A row of README's table: what was measured, its cases, and the figures and goals by name."""

    text: str
    figures: str
    goals: str


README_ROWS = (
    ReadmeRow(
        "trained tokens/s against one process, same engine and learner",
        "{pipeline_vs_plain_loop.ratio} ×",
        "{pipeline_vs_plain_loop.goal}",
    ),
    ReadmeRow(
        "six runs under `kill -9`, SQLite + files / Kafka + S3",
        "{chaos_lost_embedded.value} / {chaos_lost_cloud.value} lost, "
        "{chaos_twice_embedded.value} / {chaos_twice_cloud.value} trained twice",
        "{chaos_lost_embedded.goal}",
    ),
    ReadmeRow(
        "accuracy, answers eight versions old − fresh ones: not worse by two points in any of "
        "three worlds (lowest end, one-sided 95 %); TOPR, the default objective, was "
        "[chosen by the same rows](docs/explanation/evidence.md)",
        "{lag8_not_worse.value}",
        "{lag8_not_worse.goal}",
    ),
    ReadmeRow(
        "… equal within two points: not shown (farthest end of 90 %)",
        "{lag8_difference.value}",
        "{lag8_difference.goal}",
    ),
    ReadmeRow(
        "from a trainer's death to the next new step",
        "{recovery_time.value} s, {recovery_time.ratio} process starts",
        "{recovery_time.goal}",
    ),
    ReadmeRow(
        "publish → applied, 500 MB, 1 % changed, 1 Gbit/s, against a full version",
        "{publish_to_applied_slow_link.ratio} × faster",
        "{publish_to_applied_slow_link.goal}",
    ),
    ReadmeRow(
        "generated tokens/s with repack, long-tailed lengths (paced engine)",
        "{repack_real.ratio} ×",
        "{repack_real.goal}",
    ),
    ReadmeRow(
        "drafts from history, same tokens, 1 / 8 rows",
        "{histospec_batch_1.ratio} / {histospec_batch_8.ratio} ×",
        "{histospec_batch_1.goal} / {histospec_batch_8.goal}",
    ),
    ReadmeRow(
        "… the worst case",
        "{histospec_worst.value} ×",
        "{histospec_worst.goal}",
    ),
)


def number_text(value: float, goal: float | None = None) -> str:
    """Returns a number with three digits, or with more where it would look like its goal."""
    if math.isnan(value):
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    texts = [f"{value:.{digits}g}" for digits in range(3, 7)]
    text = next((t for t in texts if value == goal or float(t) != goal), texts[-1])
    mantissa, letter, exponent = text.partition("e")
    if letter:
        text = f"{mantissa}e{int(exponent)}"
    sign, digits = ("−", text[1:]) if text.startswith("-") else ("", text)
    return sign + (digits[1:] if digits.startswith("0.") else digits)


def goal_text(case: str) -> str:
    """Returns the goal of a case in the catalogue, a pattern's if it has none of its own."""
    patterns = {
        pattern: goal
        for benchmark in BENCHMARKS.values()
        for goals in benchmark.files.values()
        for pattern, goal in goals.items()
        if fnmatchcase(case, pattern)
    }
    goal = patterns.get(case, next(iter(patterns.values()), ""))
    return goal.replace("0.", ".").replace("-.", "−.")


def readme_lines() -> Iterator[str]:
    runs = read_runs()
    shown = {case: Shown(run) for case, run in runs.items()}
    yield "| what | result | goal | measured |"
    yield "|---|---|---|---|"
    for row in README_ROWS:
        dates = [run.measured.date for case, run in runs.items() if f"{{{case}." in row.figures]
        figures, goals = row.figures.format(**shown), row.goals.format(**shown)
        yield f"| {row.text} | {figures} | {goals.replace('**', '')} | {min(dates)} |"


def readme_names() -> list[str]:
    """Returns the NAMES that measure the cases of README's table."""
    cases = {case for row in README_ROWS for case in re.findall(r"{(\w+)\.", row.figures)}
    return [name for name in BENCHMARKS if any(BENCHMARKS[name].lists(case) for case in cases)]


def all_lines() -> Iterator[str]:
    """The table of all cases that have a last run, by NAME, and the names of the others."""
    runs = read_runs()
    machines = sorted({run.measured.machine for run in runs.values()})
    letters = {machine: chr(ord("A") + place) for place, machine in enumerate(machines)}
    for name in BENCHMARKS:
        ours = [run for case, run in runs.items() if BENCHMARKS[name].lists(case)]
        if ours:
            yield from [f"### {name}", "", *_table(ours, letters), ""]
    yield "Machines: " + "; ".join(f"{letter} is {name}" for name, letter in letters.items()) + "."
    others = [f"`{case}`" for case in catalogue_cases() if not _fitting(runs, [case])]
    yield from ["", f"No run of these cases was kept: {', '.join(others) or 'none'}."]


def missed_lines() -> Iterator[str]:
    """The cases whose goal the last run missed, without their notes, and those that it did not
    decide.
    """
    runs = read_runs()
    yield from _table([run for run in runs.values() if run.case.met is False], notes=False)
    open_ = [c for c, run in runs.items() if run.case.met is None and goal_text(c)]
    if open_:
        yield from ["", f"Not decided: {', '.join(f'`{case}`' for case in open_)}."]


def case_lines(*patterns: str) -> Iterator[str]:
    """The table of the cases that fit these patterns, in their order."""
    yield from _table(_fitting(read_runs(), patterns))


def catalogue_cases() -> list[str]:
    """Returns the cases of the catalogue with a name or a pattern."""
    return [
        case
        for benchmark in BENCHMARKS.values()
        for goals in benchmark.files.values()
        for case in goals
    ]


def _fitting(runs: Mapping[str, LastRun], patterns: Sequence[str]) -> list[LastRun]:
    fitting = [case for pattern in patterns for case in runs if fnmatchcase(case, pattern)]
    return [runs[case] for case in dict.fromkeys(fitting)]


def _table(
    runs: Sequence[LastRun], letters: Mapping[str, str] | None = None, *, notes: bool = True
) -> Iterator[str]:
    heads = ["case", "value", "against", "ratio", "goal", "measured", *(["note"] if notes else [])]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    above = ""
    for run in runs:
        case, shown = run.case.case, Shown(run)
        text = _description(case, above)
        above = case
        what = f"{text} (`{case}`)" if text else f"`{case}`"
        cells = (what, shown.value_with_unit, shown.reference, shown.ratio, shown.goal)
        end = (_measured(run, letters), shown.note) if notes else (_measured(run, letters),)
        yield f"| {' | '.join((*cells, *end))} |"


def _description(case: str, above: str) -> str:
    """Returns the words for a case; where the row above is not what its `…` continues, that too."""
    text, cases = DESCRIPTIONS.get(case, ""), list(DESCRIPTIONS)
    if not text.startswith("…"):
        return text
    begun = [one for one in cases[: cases.index(case)] if not DESCRIPTIONS[one].startswith("…")]
    if above in cases[cases.index(begun[-1]) : cases.index(case)]:
        return text
    return f"{DESCRIPTIONS[begun[-1]]}: {text.lstrip('… ')}"


def _measured(run: LastRun, letters: Mapping[str, str] | None) -> str:
    measured = run.measured
    parts = [measured.date]
    if letters is not None:
        parts += [f"`{measured.commit}`", letters[measured.machine]]
        parts += [] if measured.load is None else [f"load {measured.load:g}"]
    return " · ".join(parts)
