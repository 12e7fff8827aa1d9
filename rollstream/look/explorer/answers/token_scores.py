"""Shows the trainer's scores of one trajectory (`analysis/token_scores.py`) by token: the entropy,
and the mismatch, which is the trainer's log-probability minus the rollout's under one version.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.errors import ConfigurationError
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.query.token_scores import ScoredTrajectory, read_token_scores
from rollstream.printable import shell_command
from rollstream.streams.records import Trajectory

# A mismatch by rounding alone is about 1e-7.
ENTROPY_DIGITS, MISMATCH_DIGITS = 5, 8


@dataclass(frozen=True, slots=True)
class ShownScores:
    """The entropy and the mismatch of each generated token, None for a token without; the lists are
    None if the trajectory has no scores. `missing` explains the absence: a sentence (`note`) and
    the command that computes them (`command`, or "").
    """

    entropy: list[float | None] | None = None
    mismatch: list[float | None] | None = None
    missing: dict[str, str] | None = None


def shown_scores(run: ExploredRun, record: Trajectory | None) -> ShownScores:
    """`record` is None for a trajectory that still runs."""
    if record is None:
        return _without("Entropy and mismatch are computed of finished trajectories.")
    if record.finish == "dead":
        return _without("It failed, so the trainer has no score of its tokens.")
    if run.token_scores is None:
        return _without("Entropy and mismatch by token are kept in a run's folder, not in a store.")
    try:
        scored = read_token_scores(run.token_scores, record)
    except ConfigurationError as error:
        return _without(f"Entropy and mismatch by token: {error}.")
    if scored is None and not run.has_weights:
        return _without("Entropy and mismatch by token are missing, and the run has no weights.")
    if scored is None:
        words = ("replay", run.folder_name, "--token-scores")
        name = f"trajectory={record.trajectory}"
        return _without(
            "Entropy and mismatch by token are computed by this command (of the whole run without "
            "--where):",
            shell_command(*words, "--where", name),
        )
    return ShownScores(
        _rounded(scored.entropy, ENTROPY_DIGITS),
        _rounded(scored.logprobs.astype(np.float64) - record.logprobs, MISMATCH_DIGITS),
        _lost(scored, record),
    )


def _without(note: str, command: str = "") -> ShownScores:
    return ShownScores(missing={"note": note, "command": command})


def _rounded(values: NDArray[np.floating[Any]], digits: int) -> list[float | None]:
    # NaN becomes None.
    return [None if value != value else round(value, digits) for value in values.tolist()]


def _lost(scored: ScoredTrajectory, record: Trajectory) -> dict[str, str] | None:
    lost = np.isnan(scored.entropy)
    if not lost.any():
        return None
    versions = [span for span in record.spans if lost[span.start : span.end].any()]
    names = ", ".join(f"v{span.version.number}" for span in versions[:6])
    more = f" and {len(versions) - 6} more" if len(versions) > 6 else ""
    return {
        "note": f"{np.count_nonzero(lost)} tokens have no entropy and no mismatch: the store did "
        f"not keep the versions that sampled them ({names}{more}).",
        "command": "",
    }
