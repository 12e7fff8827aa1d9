"""Shows the trainer's scores of one trajectory (`analysis/token_scores.py`) by token: the entropy,
and the mismatch, which is the trainer's log-probability minus the rollout's under one version.
Where scores are missing, the answer states why, and which command computes them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.analysis.token_scores import ScoredTrajectory, read_token_scores
from rollstream.errors import ConfigurationError
from rollstream.explorer.explored_run import ExploredRun
from rollstream.printable import shell_command
from rollstream.streams.records import Trajectory

ENTROPY_DIGITS, MISMATCH_DIGITS = 5, 8  # a mismatch by rounding alone is about 1e-7


@dataclass(frozen=True, slots=True)
class ShownScores:
    """Holds the entropy and the mismatch of each generated token, None for a token without; the
    lists are None if the trajectory has no scores. `missing` is None, or the part of the answer
    that explains the absence: a sentence (`note`) and a command line (`command`, or "").
    """

    entropy: list[float | None] | None = None
    mismatch: list[float | None] | None = None
    missing: dict[str, str] | None = None


def shown_scores(run: ExploredRun, record: Trajectory | None) -> ShownScores:
    """Returns what the run's folder has about the record, None for a trajectory that still runs."""
    if record is None:
        return _without("Entropy and mismatch are computed of finished trajectories.")
    if record.finish == "dead":
        return _without("It failed, so the trainer has no score of its tokens.")
    if run.token_scores is None:
        return _without("Entropy and mismatch by token are kept in a run's folder, not in a store.")
    try:
        found = read_token_scores(run.token_scores, record)
    except ConfigurationError as error:
        return _without(f"Entropy and mismatch by token: {error}.")
    if found is None and not run.has_weights:
        return _without("Entropy and mismatch by token are missing, and the run has no weights.")
    if found is None:
        words = ("replay", run.folder_name, "--token-scores")
        name = f"trajectory={record.trajectory}"
        return _without(
            "Entropy and mismatch by token are computed by this command (of the whole run without "
            "--where):",
            shell_command(*words, "--where", name),
        )
    return ShownScores(
        _rounded(found.entropy, ENTROPY_DIGITS),
        _rounded(found.logprobs.astype(np.float64) - record.logprobs, MISMATCH_DIGITS),
        _lost(found, record),
    )


def _without(note: str, command: str = "") -> ShownScores:
    return ShownScores(missing={"note": note, "command": command})


def _rounded(values: NDArray[np.floating[Any]], digits: int) -> list[float | None]:
    """Returns the values rounded; None for NaN."""
    return [None if value != value else round(value, digits) for value in values.tolist()]


def _lost(found: ScoredTrajectory, record: Trajectory) -> dict[str, str] | None:
    """Returns the part `missing` of the answer for tokens whose versions were not stored."""
    lost = np.isnan(found.entropy)
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
