"""The tokens of a trajectory with text, source, version and log-probability. Pure."""

from dataclasses import dataclass

from rollstream.analysis.text import TokenText
from rollstream.streams.draft_runs import accepted_mask
from rollstream.streams.records import ENVIRONMENT, GENERATED, Trajectory


@dataclass(frozen=True, slots=True)
class TrajectoryToken:
    """`version` and `logprob` are None except for generated tokens. `label` is `prompt`,
    `environment` or the version, e.g. `v3`. `guessed` is True for an accepted draft token.
    """

    number: int
    piece: str
    label: str
    version: int | None
    logprob: float | None
    guessed: bool = False


def trajectory_tokens(record: Trajectory, text: TokenText) -> list[TrajectoryToken]:
    """Returns all tokens in order; arrays of unequal length are cut to the shortest."""
    logprobs: list[float] = record.logprobs.tolist()
    versions = [-1] * len(logprobs)
    for span in record.spans:
        versions[span.start : span.end] = [span.version.number] * (span.end - span.start)
    numbers: list[int] = record.tokens.tolist()
    pieces = text.pieces(numbers)
    guessed: list[bool] = accepted_mask(record.drafts, len(logprobs)).tolist()
    generated = iter(zip(versions, logprobs, guessed, strict=False))
    found: list[TrajectoryToken] = []
    for number, piece, source in zip(numbers, pieces, record.sources.tolist(), strict=False):
        if source == GENERATED:
            version, logprob, drafted = next(generated, (-1, float("nan"), False))
            found.append(TrajectoryToken(number, piece, f"v{version}", version, logprob, drafted))
        else:
            label = "environment" if source == ENVIRONMENT else "prompt"
            found.append(TrajectoryToken(number, piece, label, None, None))
    return found
