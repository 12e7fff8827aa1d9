"""`rollstream inspect TRAJECTORY [RUN]`: what log and archive hold about a trajectory, or each one
of a group, its text coloured by version. `analysis/trajectory.py` gathers the facts.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text as Styled

from rollstream.errors import ConfigurationError
from rollstream.look.monitor.samples import DraftTotals, draft_totals_of
from rollstream.look.query.locate import RunLocation, locate_asked_run
from rollstream.look.query.output import cell_text
from rollstream.look.query.record_times import utc_time
from rollstream.look.query.session import QuerySession, TokenText, run_text
from rollstream.look.query.trajectory import (
    TrajectoryDetails,
    ViewRow,
    details_json,
    trajectory_details,
    trajectory_names,
)
from rollstream.run.cli.arguments import RUN_OR_ARCHIVE_HELP, CommandParser
from rollstream.run.cli.look.episode_tree import episode_lines
from rollstream.run.console import TerminalConsole
from rollstream.run.signals import warn
from rollstream.streams.records import ENVIRONMENT, GENERATED, Assignment, Partial, Trajectory
from rollstream.streams.values import accepted_mask

if TYPE_CHECKING:  # imports pyarrow, and few trajectories have scores
    from rollstream.look.query.token_scores import ScoredTrajectory


@dataclass(frozen=True, slots=True)
class TrajectoryToken:
    """A token: its id (`number`), text (`piece`), and `label`: `prompt`, `environment` (a reply in
    a dialogue) or the version, e.g. `v3`. Only generated tokens have `version`, `logprob` and the
    trainer's scores, where the run has some.
    """

    number: int
    piece: str
    label: str
    version: int | None
    logprob: float | None
    is_accepted_draft: bool = False
    trainer_logprob: float | None = None
    entropy: float | None = None


def trajectory_tokens(
    record: Trajectory, text: TokenText, scores: "ScoredTrajectory | None" = None
) -> list[TrajectoryToken]:
    """Returns the trajectory tokens in order. In a damaged record, tokens without a source are left
    out, and generated tokens without a span or log-probability get version −1 or NaN.
    """
    logprobs: list[float] = record.logprobs.tolist()
    versions = [-1] * len(logprobs)
    for span in record.spans:
        versions[span.start : span.end] = [span.version.number] * (span.end - span.start)
    numbers: list[int] = record.tokens.tolist()
    pieces = text.pieces(numbers)
    accepted: list[bool] = accepted_mask(record.drafts, len(logprobs)).tolist()
    none: list[float | None] = [None] * len(logprobs)
    trainer, entropy = none, none
    if scores is not None:
        trainer, entropy = _known(scores.logprobs.tolist()), _known(scores.entropy.tolist())
    generated = iter(zip(versions, logprobs, accepted, trainer, entropy, strict=False))
    tokens: list[TrajectoryToken] = []
    for number, piece, source in zip(numbers, pieces, record.sources.tolist(), strict=False):
        if source == GENERATED:
            facts = next(generated, (-1, float("nan"), False, None, None))
            tokens.append(TrajectoryToken(number, piece, f"v{facts[0]}", *facts))
        else:
            label = "environment" if source == ENVIRONMENT else "prompt"
            tokens.append(TrajectoryToken(number, piece, label, None, None))
    return tokens


def _known(values: list[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


# By version number modulo their count.
VERSION_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
# Tokens below this log-probability are underlined.
UNLIKELY_LOGPROB = math.log(0.1)
# Most assignments, and most partials, that are listed.
ATTEMPTS_SHOWN = 12


def render_trajectory(
    details: TrajectoryDetails,
    text: TokenText,
    logprobs: bool,
    scores: "ScoredTrajectory | None" = None,
) -> RenderableType:
    """The facts, then for a finished trajectory its text and, with `logprobs`, tokens."""
    title = Styled(f"trajectory {details.trajectory}", style="bold")
    parts: list[RenderableType] = [title, _facts(details)]
    if details.record is not None:
        tokens = trajectory_tokens(details.record, text, scores)
        if details.record.turns:
            lines = episode_lines(details.record, text.text)
            parts += ["", Styled("\n".join(lines))]
        parts += ["", _legend(text, details.record), _coloured_text(tokens)]
        if logprobs:
            parts += ["", _token_table(tokens)]
    return Group(*parts)


def _facts(details: TrajectoryDetails) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, lines in _fact_rows(details):
        table.add_row(name, Styled("\n".join(lines)))
    return table


def _fact_rows(details: TrajectoryDetails) -> Iterator[tuple[str, list[str]]]:
    record = details.record
    if record is None:
        yield "finish", ["not finished"]
    else:
        yield from _completion(details, record)
    if details.annotations:
        yield "annotations", [_annotation(row) for row in details.annotations]
    if details.spans:
        yield "versions", [_span(row) for row in details.spans]
    if details.assignments:
        yield "assigned", _first_and_last([_assignment(each) for each in details.assignments])
    if details.partials:
        yield "partials", _first_and_last([_partial(each) for each in details.partials])
    if details.trained:
        yield "trained", [_trained(row) for row in details.trained]
    if details.group is not None:
        yield "group", [_group(details.group)]


def _completion(details: TrajectoryDetails, record: Trajectory) -> Iterator[tuple[str, list[str]]]:
    # The first completion counts (invariant 2).
    late = f", {details.completions - 1} later ones ignored" if details.completions > 1 else ""
    why = f": {record.reason}" if record.reason else ""
    yield "finish", [f"{record.finish}{why}, {len(record.logprobs)} tokens generated{late}"]
    if details.reward is not None and details.reward["reward"] is not None:
        yield (
            "reward",
            [f"{cell_text(details.reward['reward'])}, from its {details.reward['source']}"],
        )
    elif record.finish != "dead":
        yield "reward", ["none yet"]
    if record.scores:
        yield "scores", [", ".join(f"{name} {value:g}" for name, value in record.scores.items())]
    yield "task", [f"{record.task}, temperature {record.temperature:g}"]
    if (drafted := draft_totals_of(record)) is not None:
        yield "drafts", [_drafts(drafted)]
    moves = f"{record.moves} moves" if record.moves != 1 else "1 move"
    yield (
        "where",
        [f"{record.rollout} term {record.rollout_term}, attempt {record.attempt}, {moves}"],
    )
    yield (
        "when",
        [
            f"{_clock(record.started_s)} to {_clock(record.finished_s)} UTC, "
            f"{record.finished_s - record.started_s:.2f} s"
        ],
    )


def _drafts(totals: DraftTotals) -> str:
    cost = "" if totals.lookup_us is None else f", {totals.lookup_us:.0f} µs each"
    return (
        f"{totals.right} of {totals.guessed} draft tokens accepted, {totals.tokens} tokens in "
        f"{totals.steps} steps; {totals.found} of {totals.asked} look-ups found a draft{cost}"
    )


def _annotation(row: ViewRow) -> str:
    value = cell_text(row["value"]) if row["value"] is not None else f"none ({row['reason']})"
    return f"{row['name']} {value}, by {row['scorer']}"


def _span(row: ViewRow) -> str:
    consumed = "" if row["lag_consumed"] is None else f", {row['lag_consumed']} when trained"
    masked = " (masked)" if row["masked"] else ""
    return (
        f"version {row['version']} term {row['term']}: tokens {row['start']} to {row['end']}, "
        f"lag {row['lag_finish']} at finish{consumed}{masked}"
    )


def _trained(row: ViewRow) -> str:
    done = f", done {cell_text(row['done'])[:19]}" if row["done"] is not None else ", not done yet"
    return (
        f"step {row['step']}, update {row['update']}, micro-batch {row['micro_batch']}, term "
        f"{row['term']}; taken {cell_text(row['taken'])[:19]}{done} UTC"
    )


def _group(row: ViewRow) -> str:
    wave = f"group {row['group']} of wave {row['wave']}, {row['trajectories']} trajectories: "
    if row["ended"] == "open":
        return f"{wave}open"
    detail = f" ({row['detail']})" if row["detail"] else ""
    when = f"at step {row['step']}, {row['seconds']:.2f} s after its admission"
    return f"{wave}{row['ended']}{detail} {when}"


def _assignment(assignment: Assignment) -> str:
    at = assignment.partial
    after = "" if at is None else f" from partial {at.partition}:{at.offset}"
    where = f"{assignment.rollout} term {assignment.rollout_term}"
    return (
        f"attempt {assignment.attempt}: {assignment.kind} on {where} under version "
        f"{assignment.version.number}{after}"
    )


def _partial(partial: Partial) -> str:
    end = partial.start + len(partial.tokens)
    where = f"{partial.rollout} term {partial.rollout_term}"
    return f"attempt {partial.attempt}: tokens {partial.start} to {end} by {where}"


def _first_and_last(lines: list[str]) -> list[str]:
    if len(lines) <= ATTEMPTS_SHOWN:
        return lines
    half = ATTEMPTS_SHOWN // 2
    return [*lines[:half], f"… {len(lines) - 2 * half} more …", *lines[-half:]]


def _legend(text: TokenText, record: Trajectory) -> Styled:
    accepted = () if record.drafts is None else (("bold", "bold"), " accepted draft, ")
    note = "" if text.is_known else "; no tokenizer was found, so tokens are numbers"
    return Styled.assemble(
        ("prompt", "dim"), ", ", ("environment", "dim italic"), ", generated in the colour of its "
        "version, ", *accepted, ("underlined", "underline"), f" below 10 % probability{note}",
    )  # fmt: skip


def _coloured_text(tokens: list[TrajectoryToken]) -> Styled:
    written = Styled()
    for label, run in groupby(tokens, key=lambda token: token.label):
        written.append(f"⟨{label}⟩", style="bold dim")
        for token in run:
            written.append(token.piece, style=_style(token))
    return written


def _token_table(tokens: list[TrajectoryToken]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("#", "token", "logprob", "probability"):
        table.add_column(name, justify="right")
    scored = any(token.entropy is not None for token in tokens)
    for name in ("trainer", "entropy") if scored else ():
        table.add_column(name, justify="right")
    table.add_column("under")
    drafted = any(token.is_accepted_draft for token in tokens)
    if drafted:
        table.add_column("draft")
    table.add_column("text")
    for index, token in enumerate(tokens):
        scores = ("", "") if token.logprob is None else (
            f"{token.logprob:.4f}", f"{math.exp(token.logprob):.4f}"
        )  # fmt: skip
        if scored:
            scores += (_score(token.trainer_logprob), _score(token.entropy))
        piece = Styled(repr(token.piece)[1:-1], style=_style(token))
        mark = ("✓" if token.is_accepted_draft else "",) if drafted else ()
        table.add_row(str(index), str(token.number), *scores, token.label, *mark, piece)
    return table


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _style(token: TrajectoryToken) -> str:
    if token.version is None:
        return "dim italic" if token.label == "environment" else "dim"
    unlikely = token.logprob is not None and token.logprob < UNLIKELY_LOGPROB
    marked = (" bold" if token.is_accepted_draft else "") + (" underline" if unlikely else "")
    return VERSION_COLOURS[token.version % len(VERSION_COLOURS)] + marked


def _clock(seconds: float) -> str:
    when = utc_time(int(seconds * 1000))
    return f"{seconds:g} s" if when is None else when.isoformat(" ", "milliseconds")[:23]


def add_arguments(command: CommandParser) -> None:
    command.add_examples("runs/quickstart-0 12.3", "--last --logprobs", "--group 12 --json")
    command.add_run(RUN_OR_ARCHIVE_HELP, before=("trajectory",))
    command.add_argument(
        "trajectory",
        metavar="TRAJECTORY",
        nargs="?",
        help="its name, or the first characters of it",
    )
    command.add_argument("--group", metavar="N", type=int, help="all trajectories of a group")
    command.add_argument("--last", action="store_true", help="the trajectory that finished last")
    help = "also print a table of all tokens, with the trainer's scores if they were computed"
    command.add_argument("--logprobs", action="store_true", help=help)
    command.add_archive()
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    name: str | None = arguments.trajectory
    if sum((name is not None, arguments.group is not None, arguments.last)) > 1:
        raise ConfigurationError("give a trajectory's name, --group N or --last: one of them")
    if name == "":
        raise ConfigurationError(
            "the trajectory's name is empty: a variable of the shell is unset?"
        )
    location = locate_asked_run(arguments.run, arguments.name, warn, arguments.is_trusted)
    text = run_text(location)
    console = TerminalConsole(highlight=False)
    with QuerySession(location, warn, arguments.skip_corrupt) as session:
        for number, trajectory in enumerate(
            trajectory_names(session, name, arguments.group, arguments.last)
        ):
            details = trajectory_details(session, trajectory)
            if arguments.json:
                print(json.dumps(details_json(details, text)))
                continue
            if number:
                console.print(Rule(style="dim") if console.is_terminal else "")
            scores = _scores(location, details) if arguments.logprobs else None
            console.print(render_trajectory(details, text, arguments.logprobs, scores))
    return 0


def _scores(location: RunLocation, details: TrajectoryDetails) -> "ScoredTrajectory | None":
    from rollstream.look.query.token_scores import TOKEN_SCORES_FILE, read_token_scores

    if details.record is None or not location.has_file(TOKEN_SCORES_FILE):
        return None
    return read_token_scores(location.files.file(TOKEN_SCORES_FILE), details.record)
