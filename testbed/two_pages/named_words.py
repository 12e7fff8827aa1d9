"""Names the numbers of printed lines (the live view, the report's summary) and of the report's
tables and notes that do not name them themselves. A number that no line lists has no name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser

from testbed.two_pages.named_paths import OWN
from testbed.two_pages.shown import ShownNumber, numbers_of, shown_in

Words = Sequence[tuple[str, str]]
"""Pairs of a pattern and the figures of its groups, in their order; `@` and of what follow one."""
N = r"(–|[-−]?[\d.,\u00a0\u202fe+-]+%?[kMG]?)"
_ALL_OWN: Words = ((r"^(.*)$", OWN),)

SUMMARY: Mapping[str, Words] = {
    "steps": (
        (rf"^{N} of {N} in ([\d:]+)", "run.steps run.steps_wanted run.seconds"),
        (rf"warm-up {N} s", "run.warmup_s"),
    ),
    "forked from": _ALL_OWN,
    "engine": _ALL_OWN,
    "held-out, sampled": (
        (rf"^{N} → {N}", "evaluation.accuracy_sampled@first evaluation.accuracy_sampled@last"),
    ),
    "held-out, greedy": (
        (rf"^{N} → {N}", "evaluation.accuracy_greedy@first evaluation.accuracy_greedy@last"),
    ),
    "reward": ((rf"^{N} → {N}", "step.reward_mean@first step.reward_mean@last"),),
    "held-out length, median": (
        (rf"^{N} → {N}", "evaluation.length_median@first evaluation.length_median@last"),
    ),
    "held-out length, p99": (
        (rf"^{N} → {N}", "evaluation.length_p99@first evaluation.length_p99@last"),
    ),
    "evaluated": ((rf"version {N} of {N}", "run.evaluated run.steps"),),
    "0.75 sampled": ((rf"after {N} s, step {N}", "run.goal_s run.goal_step"),),
    "trained": ((rf"^{N} tokens, {N} a second", "run.tokens_trained run.tokens_per_s"),),
    "lag when trained": (
        (rf"{N} mean, {N} at most", "run.lag_consumed_mean run.lag_consumed_max"),
    ),
    "groups": tuple(
        (rf"{N} {name}\b", f"run.groups_{name}")
        for name in ("admitted", "trained", "filtered", "expired", "dead", "open")
    ),
    "dropped for age": (
        (rf"^{N} answers", "fate.answers@dropped"),
        (
            rf"median {N} tokens \(trained {N}\)",
            "fate.length_median@dropped fate.length_median@trained",
        ),
    ),
    "failed": (
        (rf"^{N}:", "run.trajectories_dead"),
        (rf"\(trained {N}\)", "fate.length_median@trained"),
        (r"(.*)$", OWN),
    ),
    "asked again": _ALL_OWN,
    "released": ((rf"^{N},", "run.samples_released"),),
    "dialogues": ((rf"^{N} of their", "run.waiting_share"),),
    "idle": ((r"(\S+) (\d+%)", "rollout.idle_share"),),
    "restarts": ((rf"^{N}$", "run.restarts"),),
}
"""The rows of the report's summary, by their name."""
FRAME: Mapping[str, Words] = {
    "reward": ((rf"^{N}", "step.reward_mean@last"),),
    "by task": _ALL_OWN,
    "accuracy": (
        (rf"{N} sampled", "evaluation.accuracy_sampled@last"),
        (rf"{N} greedy", "evaluation.accuracy_greedy@last"),
        (rf"{N} pass@\d+", OWN),
        (rf"held out \(v{N}\)", "run.evaluated"),
    ),
    "tokens/s": (
        (rf"{N} trained", "run.recent_trained_per_s"),
        (rf"{N} generated", "run.generated_per_s"),
    ),
    "pace": ((rf"{N} trajectories/s", "run.trajectories_per_s"), (r"(.*)$", OWN)),
    "queue": (
        (rf"{N} open", "run.groups_open"),
        (rf"{N} ready", "run.groups_ready"),
        (r"(.*)$", OWN),
    ),
    "lengths": (
        (rf"median {N}", "step.length_median@last"),
        (rf"p99 {N}", "step.length_p99@last"),
        (r"(.*)$", OWN),
    ),
    "drafts": _ALL_OWN,
    "moves": _ALL_OWN,
    "waiting": _ALL_OWN,
    "groups": tuple(
        (rf"{N} {name}\b", f"run.groups_{name}")
        for name in ("trained", "filtered", "expired", "dead")
    ),
    "samples": _ALL_OWN,  # of the last trajectories
    "mismatch": _ALL_OWN,
    "versions": (
        (rf"v{N} newest", "run.version"),
        (rf"v{N} evaluated", "run.evaluated"),
        (r"(.*)$", OWN),
    ),
    "records": _ALL_OWN,
    "unreadable": _ALL_OWN,
    "restarts": ((rf"^{N}", "run.restarts"), (r"(.*)$", OWN)),
    "lag": _ALL_OWN,  # the head of the histograms
    "at finish": (
        (rf"{N} +{N}$", "step.lag_finish_mean@last step.lag_finish_max@last"),
        (r"(.*)$", OWN),
    ),
    "trained": (
        (rf"{N} +{N}$", "step.lag_consumed_mean@last step.lag_consumed_max@last"),
        (r"(.*)$", OWN),
    ),
    "below": (
        (rf"{N} restarts?", "run.restarts"),
        (rf"evaluated to v{N}", "run.evaluated"),
        (r"silent for [^·]*", OWN),
        (r"([\d:]+)$", "run.elapsed_s"),
    ),
    "step": ((rf"^{N} of {N}", "run.steps run.steps_wanted"), (r"(.*)$", OWN)),
}
"""The rows of a frame of `top`, by their name."""
TABLES: Mapping[str, str] = {
    "Warnings": OWN,
    "Configuration": OWN,
    "Drafts": OWN,
    "Failed, released and waiting": OWN,
    "Sigmoid fits of the reward": OWN,
    "Length and difficulty of what is trained": OWN,
    "Every admitted group has one ending": OWN,
    "Restarts": OWN,
    "Rollouts": OWN,
    "Rollouts by version": OWN,
}
"""Cards of the report whose cells or notes show numbers without naming them: none is shown at
another place.
"""


NOTES: Mapping[str, Words] = {
    "heading": (
        (rf"seed {N}", OWN),
        (rf"step {N} of {N}", "run.steps run.steps_wanted"),
        (r"([\d:]+)$", "run.seconds"),
        (r"(.*)$", OWN),  # a fork's origin, the paced engine
    ),
    "Length and difficulty of what is trained": (
        (rf"{N} trained\b", "fate.trajectories@trained"),
        (rf"{N} dropped\b", "fate.trajectories@dropped"),
        (rf"{N} dead\b", "fate.trajectories@dead"),
        (rf"{N} filtered\b", "fate.trajectories@filtered"),
        (rf"{N} open\b", "fate.trajectories@open"),
        (rf"{N} released\b", "fate.trajectories@released"),
    ),
    "Sigmoid fits of the reward": _ALL_OWN,
    "Held-out accuracy by task": _ALL_OWN,
    "Rollouts": _ALL_OWN,
    "Rollouts by version": _ALL_OWN,
}
"""The line below the title of the report (`heading`) and of each card that shows numbers there."""


def named_words(
    place: str, row: str, text: str, lines: Mapping[str, Words]
) -> Iterator[ShownNumber]:
    """Yields the numbers of one printed row."""
    rest = text
    for pattern, figures in lines.get(row, ()):
        while match := re.search(pattern, rest):
            rest = f"{rest[: match.start()]} {rest[match.end() :]}"
            if figures == OWN:
                break
            names = [figure.partition("@") for figure in figures.split()]
            words = list(match.groups())
            of = [words.pop(0)] if len(words) > len(names) else [thing for _, _, thing in names]
            for (figure, _, _), thing, word in zip(names, of, words, strict=True):
                yield from shown_in(place, row, [figure], [thing], word)
    for number, _ in numbers_of(rest):
        yield ShownNumber(place, f"{row}: {text!r}", "", "", number)


@dataclass
class ReportPage(HTMLParser):
    """Collects the numbers of `report.html`: those of elements that name them, and other cells."""

    place: str = "report.html"
    shown: list[ShownNumber] = field(default_factory=list[ShownNumber])
    card: str = ""
    _names: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    _open: list[str] = field(default_factory=list[str])
    _kinds: list[str] = field(default_factory=list[str])
    _text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("h2", "section"):
            self.card = "" if tag == "section" else self.card
        if tag in ("meta", "link", "br", "a", "path", "rect"):
            return
        self._open.append(tag)
        self._kinds.append(given.get("class") or "")
        self._names.append((given.get("data-figure") or "", given.get("data-of") or ""))
        self._text = ""

    def handle_endtag(self, tag: str) -> None:
        if tag not in self._open:
            return
        while self._open[-1] != tag:  # an element that HTML need not close
            self._close()
        figures, of = self._close()
        if tag in ("h2", "summary") and not self.card:
            self.card = self._text.strip()
        if figures:
            names = figures.split()
            # A role or rollout may have spaces in its name, an end has none.
            things = of.split() if of.split() == ["first", "last"] else [of] * len(names)
            label = f"{self.card} {figures}".strip()
            self.shown += shown_in(self.place, label, names, things, self._text)
        elif tag == "p" and self._kinds[-1:] != ["figure"]:
            row = self.card or "heading"
            self.shown += named_words(self.place, row, self._text.strip(), NOTES)
        elif tag == "td" and TABLES.get(self.card) != OWN:
            numbers = numbers_of(self._text)
            self.shown += (
                ShownNumber(self.place, f"{self.card}: {self._text!r}", "", "", number)
                for number, _ in numbers
            )
        self._text = ""

    def _close(self) -> tuple[str, str]:
        self._open.pop()
        self._kinds.pop()
        return self._names.pop()

    def handle_data(self, data: str) -> None:
        self._text += data
