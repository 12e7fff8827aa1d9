"""`rollstream replay RUN --token-scores`: the trainer's log-probability and entropy of each
generated token under the version that sampled it.

Writes RUN/token-scores.parquet and nothing else; present scores are kept, so the same command
resumes. Exit code 1: no token could be scored, because the store keeps none of the versions.
"""

import argparse
import json

from rollstream.errors import ObjectMissing
from rollstream.keep.replay_output import open_replay_source
from rollstream.keep.token_scores import TokenScoring, score_run_tokens
from rollstream.run.signals import progress_bar, warn


def main(arguments: argparse.Namespace) -> int:
    run = arguments.runs[0]
    with open_replay_source(run, arguments.name) as source:
        total = sum(source.log.end("trajectories").values())
        with progress_bar("trajectories", total) as advance:
            scoring = score_run_tokens(source, arguments.where, advance)
    if scoring.trajectories and not scoring.tokens:
        raise ObjectMissing(
            f"none of {scoring.trajectories} trajectories could be scored: the store keeps none of "
            f"the versions that sampled them ({_versions(scoring)})"
        )
    if arguments.json:
        print(json.dumps(_line(scoring)))
    else:
        _print(scoring)
    return 0


def _line(scoring: TokenScoring) -> dict[str, object]:
    return {
        "file": str(scoring.path),
        "trajectories": scoring.trajectories,
        "before": scoring.before,
        "refused": scoring.refused,
        "tokens": scoring.tokens,
        "missing_versions": dict(scoring.missing),
        "mismatch_tokens": scoring.compared,
        "mismatch_mean": scoring.difference_mean,
        "mismatch_max": scoring.difference_max,
    }


def _print(scoring: TokenScoring) -> None:
    if scoring.refused:
        warn(f"{scoring.refused} trajectories have nothing to score: they failed")
    if scoring.missing:
        lost = sum(scoring.missing.values())
        warn(
            f"{lost:,} tokens have no scores: the store does not keep {_versions(scoring)} any more"
        )
    if scoring.before:
        print(f"{scoring.before:,} trajectories had scores before")
    if scoring.compared:
        print(
            f"{scoring.trajectories:,} trajectories, {scoring.tokens:,} tokens scored; in first "
            f"spans trainer and rollout differ by {scoring.difference_mean:.2g} in the mean and "
            f"{scoring.difference_max:.2g} at most"
        )
    print(f"{scoring.path}; `rollstream explore` shows them by token")


def _versions(scoring: TokenScoring) -> str:
    names = sorted(scoring.missing)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more
