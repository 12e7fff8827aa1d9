"""`rollstream replay RUN --token-scores`: computes again, for each generated token, the
log-probability that the trainer gives it and the entropy of its distribution, under the version
that sampled it. They are kept in RUN/token-scores.parquet, where `explore` and `inspect --logprobs`
find them.

Nothing else of the run is written. What the file has is not computed again, so the same command
resumes. Exit code 1 if no token could be scored, because the store keeps none of the versions.
"""

import argparse
import json

from rollstream.cli.signals import progress_bar, warn
from rollstream.errors import ObjectMissing
from rollstream.runs.replay_output import open_replay_source
from rollstream.runs.token_scores import TokenScoring, score_run_tokens


def main(arguments: argparse.Namespace) -> int:
    """Score the tokens, and print how many, and how far they differ from the rollouts' own."""
    named = arguments.runs[0]
    with open_replay_source(named, arguments.name) as source:
        total = sum(source.log.end("trajectories").values())
        with progress_bar("trajectories", total) as advance:
            found = score_run_tokens(source, arguments.where, advance)
    if found.trajectories and not found.tokens:
        raise ObjectMissing(
            f"none of {found.trajectories} trajectories could be scored: the store keeps none of "
            f"the versions that sampled them ({_versions(found)})"
        )
    if arguments.json:
        print(json.dumps(_line(found)))
    else:
        _print(found)
    return 0


def _line(found: TokenScoring) -> dict[str, object]:
    return {
        "file": str(found.path),
        "trajectories": found.trajectories,
        "before": found.before,
        "refused": found.refused,
        "tokens": found.tokens,
        "missing_versions": dict(found.missing),
        "mismatch_tokens": found.compared,
        "mismatch_mean": found.difference_mean,
        "mismatch_max": found.difference_max,
    }


def _print(found: TokenScoring) -> None:
    if found.refused:
        warn(f"{found.refused} trajectories have nothing to score: they failed")
    if found.missing:
        lost = sum(found.missing.values())
        warn(f"{lost:,} tokens have no scores: the store does not keep {_versions(found)} any more")
    if found.before:
        print(f"{found.before:,} trajectories had scores before")
    if found.compared:
        print(
            f"{found.trajectories:,} trajectories, {found.tokens:,} tokens scored; in first spans "
            f"trainer and rollout differ by {found.difference_mean:.2g} in the mean and "
            f"{found.difference_max:.2g} at most"
        )
    print(f"{found.path}; `rollstream explore` shows them by token")


def _versions(found: TokenScoring) -> str:
    """Returns the names of the missing versions, at most six of them."""
    names = sorted(found.missing)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more
