"""A trajectory token by token: text, where it came from, version and log-probability. Pure."""

from dataclasses import dataclass

from rollstream.analysis.text import Text
from streams.drafted import marks
from streams.records import ENVIRONMENT, GENERATED, Trajectory


@dataclass(frozen=True, slots=True)
class Token:
    """`version` and `logprob` are None but for generated tokens; `label` is `prompt`,
    `environment` or `v3`. `guessed` tokens came of a draft that was right.
    """

    number: int
    piece: str
    label: str
    version: int | None
    logprob: float | None
    guessed: bool = False


def tokens_of(record: Trajectory, text: Text) -> list[Token]:
    """All tokens in order; a record whose arrays do not fit gives as many as fit."""
    logprobs: list[float] = record.logprobs.tolist()
    versions = [-1] * len(logprobs)
    for span in record.spans:
        versions[span.start : span.end] = [span.version.number] * (span.end - span.start)
    numbers: list[int] = record.tokens.tolist()
    pieces = text.pieces(numbers)
    guessed: list[bool] = marks(record.drafts, len(logprobs)).tolist()
    generated = iter(zip(versions, logprobs, guessed, strict=False))
    found: list[Token] = []
    for number, piece, source in zip(numbers, pieces, record.sources.tolist(), strict=False):
        if source == GENERATED:
            version, logprob, drafted = next(generated, (-1, float("nan"), False))
            found.append(Token(number, piece, f"v{version}", version, logprob, drafted))
        else:
            label = "environment" if source == ENVIRONMENT else "prompt"
            found.append(Token(number, piece, label, None, None))
    return found
